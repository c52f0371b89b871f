"""The configuration section ``[tx]``."""

from dataclasses import dataclass

from martlet.config import setting

__all__ = ["TxConfig"]


@dataclass(frozen=True, slots=True)
class TxConfig:
    """Transactional messages."""

    check_interval_ms: int = setting(
        30_000,
        "how often producers are asked about their pending transactions (transactionCheckInterval)",
        unit="ms",
        low=10,
        high=86_400_000,
    )
    immunity_ms: int = setting(
        6_000,
        "age from which a transaction is asked about, unless its message says CHECK_IMMUNITY_TIME_IN_SECONDS "
        "(transactionTimeOut)",
        unit="ms",
        low=0,
        high=86_400_000,
    )
    checks_max: int = setting(
        15,
        "after this many checks without an answer the message is moved to TRANS_CHECK_MAX_TIME_TOPIC "
        "(transactionCheckMax)",
        low=1,
        high=250,
    )
    check_bytes_max: int = setting(
        16 * 1024 * 1024,
        "half messages that a round of checks sends to the producers of one group; the others wait for the next round",
        unit="bytes",
        low=1,
        high=1 << 40,
    )
    pending_max: int = setting(
        1_000_000,
        "pending transactions; while there are more, new ones are refused. Each costs 2 bytes of memory if all are "
        "close together, 1,400 if each is far from the others",
        low=1,
        high=100_000_000,
    )
