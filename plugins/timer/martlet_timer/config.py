"""The configuration section ``[timer]``."""

from martlet.config import Settings, setting

__all__ = ["TimerConfig"]


class TimerConfig(Settings):
    """Delayed messages."""

    levels: str = setting(
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
        "the delay of each level, from level 1 on (messageDelayLevel); units are s, m, h and d",
    )
    delay_max_s: int = setting(
        259_200,
        "how far in the future a timed message may be due (timerMaxDelaySec)",
        unit="s",
        low=1,
        high=10 * 366 * 86_400,
    )
    period_min_ms: int = setting(
        100,
        "the shortest period of a message that is repeated; a shorter one is refused",
        unit="ms",
        low=1,
        high=60_000,
    )
    schedules_max: int = setting(
        10_000, "how many repeated messages may be pending; each takes about 0.5 KB of memory", low=0, high=1_000_000
    )
