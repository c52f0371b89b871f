"""The hash of a topic and a key, as RocketMQ computes it (IndexFile.java, indexKeyHashMethod)."""

from operator import mul
from typing import Final, final

from martlet.records.codec import POWERS_OF, hash_code
from martlet.store.queues.queues import Queue

__all__ = ["KeyHashes"]

# Prefixes of unique keys whose hash is cached: one per client and minute.
PREFIXES_MAX: Final = 4096
# The end of a unique key, which differs between messages (the low half of the time, and the counter).
SUFFIX_BYTES: Final = 8
SUFFIX_POWERS: Final = POWERS_OF[SUFFIX_BYTES]
# Powers of 31, by exponent.
POWER: Final = tuple(reversed(POWERS_OF[256]))


@final
class KeyHashes:
    """Hashes keys; remembers the hashes of prefixes, which most keys share."""

    def __init__(self) -> None:
        self._prefixes: dict[bytes, int] = {}

    def of(self, queue: Queue, key: bytes) -> int:
        """Return the hash of *key* of a message in *queue*'s topic, which is never negative."""
        size = len(key)
        if queue.topic_hash < 0:
            queue.topic_hash = hash_code(queue.topic_bytes + b"#")
        if SUFFIX_BYTES <= size < 256 and key.isascii():
            prefix = key[:-SUFFIX_BYTES]
            prefix_hash = self._prefixes.get(prefix)
            if prefix_hash is None:
                prefix_hash = self._remember(prefix)
            code: int = sum(map(mul, key[-SUFFIX_BYTES:], SUFFIX_POWERS), prefix_hash + queue.topic_hash * POWER[size])
            code &= 0xFFFFFFFF
        else:
            code = hash_code(b"%b#%b" % (queue.topic_bytes, key))
        if code & 0x80000000:
            code = 0x1_0000_0000 - code
        return 0 if code == 0x80000000 else code

    def _remember(self, prefix: bytes) -> int:
        if len(self._prefixes) >= PREFIXES_MAX:
            self._prefixes.clear()
        code = self._prefixes[prefix] = hash_code(prefix) * POWER[SUFFIX_BYTES]
        return code
