"""The configuration section ``[acl]``."""

from martlet.config import Settings, setting
from martlet_acl.passwords import COST, COST_MAX, COST_MIN

__all__ = ["AclConfig"]


class AclConfig(Settings):
    """Users, groups of users, and rules for what they may do; they are in two files of the data directory."""

    watch_s: float = setting(
        5.0,
        "how often to look whether somebody has edited the files; 0: only at SIGHUP and before a change",
        unit="s",
        low=0,
        high=3600,
    )
    password_cost: int = setting(
        COST,
        "exponent of scrypt's N for new passwords; 12 takes about 6 ms of a core and 4 MiB, each step doubles both",
        low=COST_MIN,
        high=COST_MAX,
    )
