"""A `Condition` reads what its predicate alone would read, and calls it for few other records."""

import random
from collections.abc import Awaitable, Callable
from unittest.mock import ANY

import pytest

from martlet.message import Message
from martlet.records.layout import Condition, Find, Predicate, RecordView
from martlet.store import ReadResult, ReadStatus, Store
from martlet.store.disk.page_cache import Page
from martlet.store.read.needle_match import PLACE_BYTES, PLACES_MAX, SEARCHED_BYTES_MAX, STEPS_MAX, NeedleSearch
from martlet.store.read.reading import TESTED_MAX
from martlet.testing.stores import bodies, small_config

OpenStore = Callable[..., Awaitable[Store]]
QUEUES = 3


def find_all(needle: bytes) -> Callable[[bytes | bytearray, int, int], list[int] | None]:
    def find(data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
        found: list[int] = []
        at = data.find(needle, begin, end)
        while at >= 0:
            found.append(at)
            at = data.find(needle, at + 1, end)
        return found

    return find


class Counting:
    """Selects records with property ``a`` = ``x``, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, record: RecordView) -> bool:
        self.calls += 1
        return record.property("a") == "x"


def fill(store: Store, count: int, share: int, seed: int = 1, body: int = 60) -> list[list[bytes]]:
    """Store *count* messages, one in *share* with ``a`` = ``x``; return the bodies of those by queue."""
    source = random.Random(seed)
    wanted: list[list[bytes]] = [[] for _ in range(QUEUES)]
    for number in range(count):
        queue = source.randrange(QUEUES)
        selected = source.randrange(share) == 0
        # The needle is in other records as well: in a body, and in a longer name.
        text = b"%d " % number + (b"a\x01x " if source.randrange(7) == 0 else b"") + b"." * source.randrange(body)
        properties = b"a\x01x\x02" if selected else b"aa\x01x\x02" if source.randrange(9) == 0 else b"b\x01x\x02"
        store.writer.append(Message("T", text, properties), queue)
        if selected:
            wanted[queue].append(text)
        if source.randrange(10) == 0:
            store.committer.commit()
    store.committer.commit()
    return wanted


def read_all(store: Store, queue_id: int, predicate: Predicate, messages: int, budget: int) -> list[bytes]:
    queue = store.queue("T", queue_id)
    found: list[bytes] = []
    offset = 0
    while offset < store.readers.end_offset(queue):
        result: ReadResult = store.readers.read(queue, offset, messages, budget, predicate=predicate)
        assert result.next_offset > offset
        assert (result.status is ReadStatus.FOUND) == (result.count > 0)
        assert result.count <= messages
        found += bodies(result.pieces)
        offset = result.next_offset
    return found


@pytest.mark.parametrize("page_bytes", [256, 1024, 4096])
@pytest.mark.parametrize("share", [1, 3, 50])
async def test_a_condition_selects_what_its_predicate_selects(
    open_store: OpenStore, page_bytes: int, share: int
) -> None:
    store = await open_store(small_config(flush="async", page_bytes=page_bytes, cache_bytes=4 * page_bytes))
    condition = Condition(Counting(), find=find_all(b"a\x01x"))
    wanted = fill(store, 600, share)
    for messages, budget in ((1, 1 << 20), (7, 700), (1000, 1 << 20)):
        for queue_id in range(QUEUES):
            assert read_all(store, queue_id, condition, messages, budget) == wanted[queue_id]
    # The end of the log grows: only the new bytes are searched.
    for queue_id, more in enumerate(fill(store, 50, share, seed=2)):
        wanted[queue_id] += more
        assert read_all(store, queue_id, condition, 5, 1 << 20) == wanted[queue_id]


async def test_the_predicate_is_called_for_few_records(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="async", page_bytes=65536, segment_bytes=1 << 20))
    wanted = fill(store, 3000, 100)
    plain, narrowed = Counting(), Counting()
    for queue_id in range(QUEUES):
        found = read_all(store, queue_id, Condition(narrowed, find=find_all(b"a\x01x")), 1000, 1 << 20)
        assert found == read_all(store, queue_id, plain, 1000, 1 << 20) == wanted[queue_id]
    assert plain.calls == 3000
    # 1 % match, 14 % have the needle in their body, 11 % in a longer name; the last record of each page is asked too.
    assert narrowed.calls < 1000


async def test_a_page_is_searched_once_for_all_queues(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="async", page_bytes=65536, segment_bytes=1 << 20, cache_bytes=1 << 20))
    wanted = fill(store, 1000, 10)
    searched: list[tuple[int, int]] = []

    def find(data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
        searched.append((id(data), end - begin))
        return find_all(b"a\x01x")(data, begin, end)

    condition = Condition(Counting(), find=find)
    for _ in range(2):
        for queue_id in range(QUEUES):
            assert read_all(store, queue_id, condition, 1000, 1 << 20) == wanted[queue_id]
    # Twice at the end of the log, where the queues end one after the other.
    assert sum(length for _, length in searched) <= store.written + 3 * 300


async def test_a_find_that_gives_up_or_finds_everything_changes_nothing(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="async", page_bytes=4096))
    wanted = fill(store, 300, 5)
    for find in (lambda data, begin, end: None, lambda data, begin, end: list(range(begin, end))):
        condition = Condition(Counting(), find=find)
        assert [read_all(store, queue_id, condition, 9, 1 << 20) for queue_id in range(QUEUES)] == wanted


async def test_a_read_tests_fewer_records_with_a_condition_that_costs_more(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="async", page_bytes=65536, segment_bytes=1 << 20))
    fill(store, 3 * TESTED_MAX, 10**9)
    queue = store.queue("T", 0)
    for cost, calls in ((1, TESTED_MAX), (8, TESTED_MAX // 8), (10**6, 1)):
        counting = Counting()
        result = store.readers.read(queue, 0, 32, 1 << 20, predicate=Condition(counting, cost))
        assert result.next_offset == counting.calls <= calls
        assert counting.calls == min(calls, store.readers.end_offset(queue))


async def test_a_read_ends_after_a_number_of_steps(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="async", page_bytes=65536, segment_bytes=1 << 20))
    wanted = fill(store, 300, 2)
    steps = [10**9]

    def slowly(record: RecordView) -> bool:
        steps[0] += STEPS_MAX // 4
        return record.property("a") == "x"

    condition = Condition(slowly, steps=steps)
    queue = store.queue("T", 0)
    for offset in (0, 4, 8):
        assert store.readers.read(queue, offset, 1000, 1 << 20, predicate=condition).next_offset == offset + 4
    assert read_all(store, 0, condition, 1000, 1 << 20) == wanted[0]


def entries(*placed: tuple[int, int]) -> bytes:
    return b"".join(position.to_bytes(8, "big") + size.to_bytes(4, "big") + bytes(8) for position, size in placed)


def candidates(
    data: bytes, find: Find, load: Callable[[int], Page | None], count_max: int = 10**6
) -> tuple[list[int] | None, int]:
    return NeedleSearch(find, None, load).candidates(data, count_max)


PAGE_BYTES = SEARCHED_BYTES_MAX // 4


class Pages:
    """Pages full of *byte*, and the numbers of those that were loaded."""

    def __init__(self, byte: bytes = b".") -> None:
        self.byte = byte
        self.loaded: list[int] = []

    def __call__(self, position: int) -> Page:
        self.loaded.append(position // PAGE_BYTES)
        return Page(position - position % PAGE_BYTES, self.byte * PAGE_BYTES, True)


def test_a_search_ends_after_a_number_of_bytes() -> None:
    pages = Pages()
    placed = [(position, 1000) for position in range(0, 10 * PAGE_BYTES, 1000)]
    found, checked = candidates(entries(*placed), find_all(b"x"), pages)
    assert pages.loaded == [0, 1, 2, 3]
    assert placed[checked][0] >= 4 * PAGE_BYTES > placed[checked - 1][0]
    assert found is not None
    assert len(found) == 4, "the last one of each page"


def test_the_searches_of_a_read_end_at_the_same_page_wherever_they_begin() -> None:
    for first in (0, PAGE_BYTES // 2, PAGE_BYTES - 1000):
        pages = Pages()
        search = NeedleSearch(find_all(b"x"), None, pages)
        placed = [(position, 1000) for position in range(first, 10 * PAGE_BYTES, 1000)]
        at = 0
        while checked := search.candidates(entries(*placed[at : at + 500]), 10**6)[1]:
            at += checked
        assert set(pages.loaded) == {0, 1, 2, 3}
        assert placed[at][0] >= 4 * PAGE_BYTES > placed[at - 1][0]


def test_a_search_ends_sooner_when_it_finds_many_places() -> None:
    per_page = SEARCHED_BYTES_MAX // 2 // PLACE_BYTES
    pages = Pages()
    placed = [(position, 1000) for position in range(0, 10 * PAGE_BYTES, 1000)]
    _, checked = candidates(entries(*placed), lambda data, begin, end: list(range(begin, begin + per_page)), pages)
    assert pages.loaded == [0, 1]
    assert placed[checked][0] >= 2 * PAGE_BYTES > placed[checked - 1][0]
    pages = Pages()
    found, checked = candidates(entries(*placed), lambda data, begin, end: None, pages, 10)
    assert found == list(range(checked))
    assert pages.loaded == [0]


def test_a_search_ends_after_a_number_of_steps() -> None:
    steps = [10**9]

    def find(data: bytes | bytearray, begin: int, end: int) -> list[int]:
        steps[0] += STEPS_MAX // 2
        return []

    pages = Pages()
    placed = [(position, 1000) for position in range(0, 10 * PAGE_BYTES, 1000)]
    for read in range(2):
        assert NeedleSearch(find, steps, pages).candidates(entries(*placed), 10**6)[1] > 0
        assert pages.loaded == [0, 1] * (read + 1)


async def test_a_read_of_many_blocks_of_entries_searches_a_bounded_part_of_the_log(open_store: OpenStore) -> None:
    store = await open_store(
        small_config(flush="async", page_bytes=1 << 18, segment_bytes=1 << 24, cache_bytes=1 << 20)
    )
    for number in range(5000):
        store.writer.append(Message("T", b"x" * 2500, b"a\x01%d" % number), 0)
        if number % 100 == 0:
            store.committer.commit()
    store.committer.commit()
    await store.upkeep.checkpointer.checkpoint()
    searched = 0

    def find(data: bytes | bytearray, begin: int, end: int) -> list[int]:
        nonlocal searched
        searched += end - begin
        return []

    condition = Condition(lambda record: False, find=find)
    result = store.readers.read(store.queue("T", 0), 0, 32, 1 << 20, predicate=condition)
    assert result.status is ReadStatus.NO_MATCH
    assert SEARCHED_BYTES_MAX // 2 < searched <= SEARCHED_BYTES_MAX


def test_damaged_entries_are_all_tested() -> None:
    page = Page(0, bytes(10_000), True)
    data = entries((5000, 100), (100, 100), (7000, 100))
    assert candidates(data, find_all(b"x"), lambda position: page) == ([0, 1, 2], 3)
    assert candidates(entries((0, 0x7FFFFFFF), (100, 100)), find_all(b"x"), lambda position: None) == (None, 2)


def test_few_records_of_a_large_page_are_tested_without_a_search() -> None:
    page = Page(0, bytes(1 << 20), True)

    def never(data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
        raise AssertionError

    placed = [(position, 100) for position in range(0, 1 << 20, 1 << 15)]
    assert candidates(entries(*placed), never, lambda position: page) == (list(range(32)), 32)


def test_a_page_keeps_a_bounded_number_of_places() -> None:
    data = bytearray(b"x" * 40_000)
    page = Page(0, data, True)
    placed = [(position, 100) for position in range(0, 40_000, 100)]
    for count in (40, 80, 400):
        found, checked = candidates(entries(*placed[:count]), find_all(b"x"), lambda position: page)
        assert (found, checked) == (list(range(count)), count)
        assert page.searched is not None
        assert page.searched[2] is None or len(page.searched[2]) <= PLACES_MAX
    assert page.searched == (ANY, 40_000, None)
