"""The kernel indexes keys as Python does: the same entries, slots and counts."""

from array import array
from collections import deque
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.store.keys.active_file import ActiveFile
from martlet.store.keys.index_files import IndexFile
from martlet.store.keys.key_hashes import KeyHashes
from martlet.store.keys.usual import SHORT_BYTES, index_usual
from martlet.store.queues.queues import Queue

KEYS = st.one_of(st.text("ab1Ä☃😀 ", max_size=40).map(str.encode), st.binary(max_size=12))
PARTS = st.one_of(
    st.tuples(st.sampled_from([b"UNIQ_KEY", b"KEYS", b"MYKEYS", b"xUNIQ_KEY", b"TAGS"]), KEYS).map(b"\x01".join),
    st.sampled_from([b"UNIQ_KEY\x01" + b"7F" * 16, b"KEYS\x01" + b"k" * 300, b"KEYS\x01", b"v\x01UNIQ_KEY\x01x"]),
)
PROPERTIES = st.one_of(
    st.lists(PARTS, max_size=4).map(b"\x02".join),
    st.sampled_from([b"KEYS\x01" + b"a" * SHORT_BYTES, b"TAGS\x01" * 500]),
)
MESSAGES = st.tuples(st.integers(0, 2), PROPERTIES, st.integers(0, 1 << 62), st.integers(0, 1 << 44))


class World:
    """An index file with 100 slots and room for 20 entries."""

    def __init__(self, *, has_file: bool) -> None:
        self.active = ActiveFile(SimpleNamespace(slots=100, entries_max=20))  # type: ignore[arg-type]
        self.queues = [Queue("t", 0), Queue("Ä☃", 1), Queue("T" * 300, 2)]
        if has_file:
            self.active.item = IndexFile("")
            self.active.item.begin_ms = 1_000_000
            self.active.slots = memoryview(array("i", [0] * 100))
            self.active.dirty_pages = bytearray(1)

    def index(
        self, function: Any, messages: list[tuple[int, bytes, int, int]], budget: int, entries_max: int
    ) -> list[Any]:
        """Return everything that *function* has done with *messages*."""
        waiting = deque((self.queues[queue], at, at + 1, ms, text) for queue, text, at, ms in messages)
        answer = function(waiting, budget, self.active, entries_max, KeyHashes())
        active, item = self.active, self.active.item
        header = item.header() if item is not None else None
        return [answer, bytes(active.slots), bytes(active.dirty_pages), bytes(active.entries), header, len(waiting)]


@given(st.lists(MESSAGES, max_size=8), st.integers(1, 12), st.integers(5, 20), st.booleans())
def test_the_kernel_indexes_what_python_indexes(
    messages: list[tuple[int, bytes, int, int]], budget: int, entries_max: int, has_file: bool
) -> None:
    python = World(has_file=has_file).index(index_usual, messages, budget, entries_max)
    kernel = World(has_file=has_file).index(kernel_of(index_usual), messages, budget, entries_max)
    done = kernel[0][0]
    if done < python[0][0]:  # a key that is no UTF-8: the kernel leaves the message to Python
        assert not _is_text(messages[done][1])
        python = World(has_file=has_file).index(index_usual, messages[:done], budget, entries_max)
        python[-1] = len(messages)
    assert kernel == python


def _is_text(properties: bytes) -> bool:
    try:
        properties.decode()
    except UnicodeDecodeError:
        return False
    return True
