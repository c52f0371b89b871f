"""The kernel splits the body of a batch as Python does, and makes the same items of its messages."""

from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.message import PROPERTIES_BYTES_MAX
from martlet.store.format.tags import TagCodes
from martlet.store.queues.queues import Queue
from martlet_remoting.shared.templates import batch_items
from martlet_remoting.wire.batches import HEAD, TAIL, Member, take_members

I32 = st.integers(-(1 << 31), (1 << 31) - 1)
PROPERTIES = st.one_of(
    st.lists(st.sampled_from([b"TAGS\x01a\x02", b"TAGS\x01\xff\x02", b"xTAGS\x01a", b"UNIQ_KEY\x017F\x02"])).map(
        b"".join
    ),
    st.binary(max_size=9),
    st.sampled_from([b"p" * PROPERTIES_BYTES_MAX, b"p" * (PROPERTIES_BYTES_MAX + 1)]),
)
MEMBERS = st.tuples(st.binary(max_size=40), PROPERTIES, I32)
ERRORS = st.one_of(st.just(0), st.just(0), st.just(0), st.sampled_from([1, -1, -22, 1 << 20, -(1 << 30)]))


def encode(member: Member, size_error: int, body_error: int, properties_error: int) -> bytes:
    """Return *member* as in a batch, with errors in its lengths."""
    body, properties, flag = member
    size = 22 + len(body) + len(properties) + size_error
    head = HEAD.pack(size, 0, 0, flag, len(body) + body_error)
    said = (len(properties) + properties_error) % (1 << 16)
    return head + body + TAIL.pack(said - (said >> 15 << 16)) + properties


@given(
    st.lists(st.tuples(MEMBERS, ERRORS, ERRORS, ERRORS), max_size=6), st.integers(0, 30), st.integers(0, 7), st.data()
)
def test_the_kernel_takes_the_messages_that_python_takes(
    members: list[tuple[Member, int, int, int]], start: int, count_max: int, data: st.DataObject
) -> None:
    batch = b"".join([encode(*member) for member in members])
    batch = batch[: len(batch) - data.draw(st.integers(0, 30))]
    kernel: list[Member] = []
    python: list[Member] = []
    for position in 0, min(start, len(batch)):
        stop = take_members(batch, position, count_max, python)
        assert kernel_of(take_members)(batch, position, count_max, kernel) == stop
    assert kernel == python


@given(st.lists(MEMBERS, max_size=6), I32, st.integers(0, 1 << 44), I32)
def test_the_kernel_makes_the_items_that_python_makes(
    members: list[Member], sys_flag: int, born_ms: int, times: int
) -> None:
    rest = Queue("t", 3), sys_flag, born_ms, bytes(8), times, TagCodes().of
    assert kernel_of(batch_items)(members, *rest) == batch_items(members, *rest)
