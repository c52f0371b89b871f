"""The configuration section ``[tx]``."""

from martlet.config import Settings, setting

__all__ = ["TxConfig"]

MIB = 1024 * 1024


class TxConfig(Settings):
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
        "half messages that a round of checks sends to the producers of one group; the next round goes on with "
        "the others",
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
    staged_part_bytes_max: int = setting(
        1024 * MIB, "what one task may stage of an external transaction", unit="bytes", low=1, high=1 << 40
    )
    staged_part_messages_max: int = setting(
        10_000_000, "what one task may stage of an external transaction", unit="messages", low=1, high=1 << 40
    )
    staged_transaction_bytes_max: int = setting(
        4096 * MIB,
        "size of an external transaction, with the parts of failed tasks; it is on the disk twice until retention "
        "removes what was staged",
        unit="bytes",
        low=1,
        high=1 << 40,
    )
    staged_transaction_messages_max: int = setting(
        50_000_000,
        "messages of an external transaction, with the parts of failed tasks; a commit takes about 6 us for each",
        unit="messages",
        low=1,
        high=1 << 40,
    )
    staged_bytes_max: int = setting(
        16384 * MIB,
        "what is staged in all external transactions together; while it is more, staging is refused",
        unit="bytes",
        low=1,
        high=1 << 50,
    )
    staged_chunks_max: int = setting(
        50_000,
        "staged batches in all external transactions together; each takes about 400 bytes of memory",
        unit="batches",
        low=1,
        high=1_000_000,
    )
    staged_parts_max: int = setting(
        4_000,
        "parts that are staged in all external transactions together; a run that is replaced drops all of its parts in "
        "one turn of the event loop",
        unit="parts",
        low=1,
        high=1_000_000,
    )
    staged_timeout_ms: int = setting(
        3_600_000,
        "a staged part is dropped if nothing was added to it and it was not committed for so long",
        unit="ms",
        low=100,
        high=30 * 86_400_000,
    )
    producers_max: int = setting(
        50_000,
        "producers of external transactions whose last commit is remembered; each takes about 500 bytes of memory",
        unit="producers",
        low=1,
        high=1_000_000,
    )
    producers_identity_max: int = setting(
        10_000,
        "such producers of one identity, if clients must authenticate, so that none uses up those of all others",
        unit="producers",
        low=1,
        high=1_000_000,
    )
    producer_hours: int = setting(
        720,
        "hours of operation after which an unused producer of external transactions is forgotten; a commit that it "
        "repeats then is delivered again, so this must be longer than checkpoints are kept",
        unit="h",
        low=1,
        high=1_000_000,
    )
