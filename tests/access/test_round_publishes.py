"""What the connections of one round publish is stored by one call, and each protocol answers its own clients."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import pytest
from tests.delivery.pushing import broker_in_memory

from martlet.access import Gate, RoundPublishes
from martlet.access.round_publishes import BYTES_MAX, COUNT_MAX
from martlet.broker import Broker
from martlet.contracts import Identity, Peer
from martlet.errors import MartletError, Reason, Refused, StoreFailed
from martlet.message import Message
from martlet.store.append.items import AppendItem, AppendResult
from martlet.store.append.writer import Writer
from martlet.testing.peers import RecordingPeer


class RoundPeer(RecordingPeer):
    def before_commit(self, work: Callable[[], None]) -> None:
        WORKS.append(work)


WORKS: list[Callable[[], None]] = []


class Part(NamedTuple):
    peer: Peer
    gate: Gate
    items: Sequence[AppendItem | Message]


@final
class Answers:
    """Notes what it was told of each message, in order: its offset, or why it was not stored."""

    def __init__(self) -> None:
        self.told: list[int | str] = []
        self.calls: list[int] = []
        self.ends: list[int] = []
        self.fails = False

    def answer(self, parts: Sequence[Part], result: AppendResult) -> None:
        if self.fails:
            raise ZeroDivisionError("a bug")
        assert len(result.offsets) == sum(len(part.items) for part in parts)
        self.calls.append(len(parts))
        self.ends.append(result.end)
        for index, offset in enumerate(result.offsets):
            self.told.append(str(result.refused[index]) if index in result.refused else offset)
            assert offset < 0 or result.placed(index).queue_offset == offset

    def refuse(self, parts: Sequence[Part], error: MartletError) -> None:
        self.told += [str(error)] * sum(len(part.items) for part in parts)


def part(broker: Broker, name: str, *bodies: bytes) -> Part:
    return Part(RoundPeer(), broker.gate(Identity(name)), [Message("t", body, queue_id=0) for body in bodies])


def end_round() -> None:
    while WORKS:
        WORKS.pop(0)()


@pytest.fixture(autouse=True)
def _no_works() -> None:
    WORKS.clear()


async def test_two_protocols_get_the_results_of_their_own_messages_from_one_call(appended: list[int]) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.authorizers = (lambda identity, action, name: identity.name != "eve",)
        publishes, one, two = RoundPublishes(), Answers(), Answers()
        publishes.add(one, part(broker, "ann", b"0", b"1"), 2)
        publishes.add(two, part(broker, "bob", b"3"), 1)
        publishes.add(one, part(broker, "eve", b"-"), 1)
        publishes.add(one, part(broker, "ann", b"2"), 1)
        publishes.add(two, part(broker, "eve", b"-"), 1)
        assert not appended
        assert set(publishes.parts) == {one, two}
        end_round()
        assert appended == [4]
        assert not publishes.parts
        (refused,) = {each for each in one.told + two.told if isinstance(each, str)}
        assert one.told == [0, 1, refused, 2]
        assert two.told == [3, refused]
        assert (one.calls, two.calls) == ([3], [2])
        assert 0 < one.ends[0] < two.ends[0] == broker.store.appended


@pytest.mark.parametrize("sizes", [[COUNT_MAX - 1, 1], [COUNT_MAX + 5], [1, COUNT_MAX - 1]])
async def test_very_many_messages_are_stored_before_the_end_of_the_round(sizes: list[int], appended: list[int]) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publishes, answers = RoundPublishes(), Answers()
        for size in sizes:
            publishes.add(answers, part(broker, "ann", *[b"x"] * size), size)
        assert appended == [sum(sizes)]
        publishes.add(answers, part(broker, "ann", b"y"), BYTES_MAX - 1)
        assert appended == [sum(sizes)]
        publishes.add(answers, part(broker, "ann", b"z"), 1)
        assert appended == [sum(sizes), 2]
        end_round()
        assert appended == [sum(sizes), 2]


async def test_a_failing_disk_is_told_to_each_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker_in_memory() as broker:
        publishes, one, two = RoundPublishes(), Answers(), Answers()

        def fail(*args: object, **more: object) -> AppendResult:
            raise StoreFailed("the disk is gone")

        publishes.add(one, part(broker, "ann", b"0", b"1"), 2)
        publishes.add(two, part(broker, "bob", b"3"), 1)
        with monkeypatch.context() as patched:
            patched.setattr(Writer, "append_all", fail)
            end_round()
        assert one.told == ["the disk is gone"] * 2
        assert two.told == ["the disk is gone"]


async def test_a_bug_ends_all_connections_of_the_round_and_no_later_ones() -> None:
    async with broker_in_memory() as broker:
        publishes, answers = RoundPublishes(), Answers()
        parts = [part(broker, name, b"x") for name in ("ann", "bob")]
        for each in parts:
            publishes.add(answers, each, 1)
        answers.fails = True
        with pytest.raises(ZeroDivisionError):
            end_round()
        reasons = [each.peer.reason for each in parts if isinstance(each.peer, RoundPeer)]
        assert reasons == ["ZeroDivisionError: a bug"] * 2
        answers.fails = False
        broker.topics.ensure("t", 1)
        publishes.add(answers, part(broker, "ann", b"y"), 1)
        end_round()
        assert answers.told == [0]


def test_a_part_of_a_result_has_the_refusals_of_its_messages() -> None:
    result = AppendResult([None] * 4)
    result.positions, result.ends, result.offsets = [0, -1, 10, 20], [10, -1, 20, 30], [5, -1, 6, 7]
    result.refused, result.end, result.store_ms, result.rolled = {1: Refused(Reason.BUSY, "not now")}, 30, 9, True
    found = result.part(1, 3)
    assert (found.positions, found.ends, found.offsets) == ([-1, 10], [-1, 20], [-1, 6])
    assert list(found.refused) == [0]
    assert (found.end, found.store_ms, found.rolled) == (20, 9, True)
    assert not result.part(2, 4).refused
