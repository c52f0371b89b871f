"""The configuration section ``[acl]``."""

from martlet.config import setting
from martlet_acl.passwords import COST, COST_MAX, COST_MIN
from martlet_acl.tokens import TokenConfig

__all__ = ["AclConfig"]


class AclConfig(TokenConfig):
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
    audit_file: str = setting(
        "audit.log", "file of the audit trail, relative to the data directory; empty: no audit trail"
    )
    audit_bytes_max: int = setting(
        64 << 20, "size at which the file of the audit trail is replaced by a new one", unit="bytes", low=1 << 16
    )
    audit_files_max: int = setting(5, "how many older files of the audit trail are kept", low=0, high=1000)
    audit_topic: str = setting("", "a topic that gets the lines of the audit trail as well; empty: none")
