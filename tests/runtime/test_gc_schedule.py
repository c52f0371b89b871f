"""Collections are short however many objects live, and old garbage goes while the process is idle."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import trio
from trio.testing import MockClock

from martlet.runtime.gc_schedule import FREEZES_OF_A_COLLECTION, LATEST_S, LOOK_S, YOUNG_OBJECTS, OldObjects


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


class Used:
    """Processor time that grows by *step_s* at every look."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.total_s = 0.0

    def __call__(self) -> float:
        self.total_s += self.step_s
        return self.total_s


@pytest.fixture
def used() -> Used:
    return Used()


@pytest.fixture
def old(used: Used) -> Iterator[OldObjects]:
    old = OldObjects(used)
    gc.collect()
    old.start()
    yield old
    old.stop()


def make_old(old: OldObjects) -> None:
    """Freeze so many objects that a full collection is due."""
    kept: list[list[int]] = []
    while old.freezes < FREEZES_OF_A_COLLECTION:
        kept.append([])


def test_no_collection_walks_many_objects(old: OldObjects) -> None:
    walked: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            walked.append(len(gc.get_objects()))  # which leaves frozen ones out

    gc.callbacks.append(count)
    try:
        live = [[number] for number in range(100 * YOUNG_OBJECTS)]
    finally:
        gc.callbacks.remove(count)
    assert len(live) == 100 * YOUNG_OBJECTS
    assert len(walked) > 50
    assert max(walked) <= 2 * YOUNG_OBJECTS + 500  # and what the test itself made


def test_young_garbage_goes_without_a_full_collection(old: OldObjects) -> None:
    nodes = [weakref.ref(Node()) for _ in range(100)]
    kept: list[list[int]] = []
    while old.freezes < 1:
        kept.append([])
    assert [node() for node in nodes if node() is not None] == []


def test_frozen_objects_go_with_their_last_reference(old: OldObjects) -> None:
    node = Node()
    make_old(old)
    gone = weakref.ref(node)
    node.itself = None  # type: ignore[assignment]
    del node
    assert gone() is None


async def test_old_garbage_goes_once_the_process_is_idle(
    old: OldObjects, used: Used, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    used.step_s = 1.0  # busy
    nursery.start_soon(old.run)
    node = Node()
    gone = weakref.ref(node)
    make_old(old)
    del node
    await trio.sleep(10 * LOOK_S)
    assert gone() is not None
    used.step_s = 0.0
    await trio.sleep(3 * LOOK_S)
    assert gone() is None
    assert old.freezes == 0


async def test_a_process_that_is_never_idle_does_a_full_collection_at_last(
    old: OldObjects, used: Used, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    used.step_s = 1.0
    nursery.start_soon(old.run)
    make_old(old)
    await trio.sleep(LATEST_S - 10 * LOOK_S)
    assert old.freezes >= FREEZES_OF_A_COLLECTION
    await trio.sleep(20 * LOOK_S)
    assert old.freezes < FREEZES_OF_A_COLLECTION


async def test_an_idle_process_with_few_new_objects_does_no_full_collection(
    old: OldObjects, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    nursery.start_soon(old.run)
    node = weakref.ref(Node())
    gc.freeze()
    await trio.sleep(100 * LOOK_S)
    assert node() is not None
