"""Heart-beats: often enough and not much more often, both ways."""

from pathlib import Path

import pytest
import trio
from tests.wire_clients.stomp import V1_0, V1_1, V1_2, StompClient, stomp_broker
from trio.testing import MockClock

from martlet.testing.peers import RecordingPeer
from martlet_stomp.config import StompConfig
from martlet_stomp.shared.heartbeats import BEATS_A_TURN, Heartbeats
from martlet_stomp.wire.packets import Version


async def beats_within(talk: StompClient, seconds: float) -> list[float]:
    """Return when heart-beats came, in seconds from now."""
    began, found = trio.current_time(), list[float]()
    with trio.move_on_after(seconds):
        while data := await talk.wire.receive_some():
            assert not data.strip(b"\n"), data
            found += [trio.current_time() - began] * len(data)
    return found


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("0,0", "0,0"),
        ("1000,0", "0,1000"),
        ("0,1000", "1000,0"),
        ("2000,3000", "3000,2000"),
        ("1,1", "500,500"),
    ],
)
async def test_both_agree_on_the_larger_interval(
    tmp_path: Path, asked: str, answer: str, autojump_clock: MockClock
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        _, connected = await stomp.answer(V1_2, heart_beat=asked)
        assert connected["heart-beat"] == answer


@pytest.mark.parametrize("version", [V1_1, V1_2])
async def test_an_idle_client_gets_heart_beats_within_the_interval(
    tmp_path: Path, version: Version, autojump_clock: MockClock
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version, heart_beat="0,1000")
        came = await beats_within(talk, 60)
        gaps = [later - earlier for earlier, later in zip([0.0, *came], came, strict=False)]
        assert all(0.9 <= gap <= 1.0 for gap in gaps), gaps
        assert 60 <= len(came) <= 66


async def test_a_client_that_gets_messages_gets_no_heart_beats(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, sender = await stomp.connect(heart_beat="0,1000"), await stomp.connect()
        await talk.subscribe("/topic/a")
        for number in range(30):
            await trio.sleep(0.4)
            await sender.publish("/topic/a", b"%d" % number)
        assert stomp.context.heartbeats.sent <= 1
        assert len(await talk.bodies(30)) == 30
        assert await beats_within(talk, 5)


@pytest.mark.parametrize("destination", ["/topic/a", "/topic/mqtt/a/#"])
async def test_messages_that_are_for_others_are_no_heart_beats(
    tmp_path: Path, destination: str, autojump_clock: MockClock
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(heart_beat="0,1000")
        await talk.subscribe(destination, **{"activemq.noLocal": "true"})
        for number in range(30):
            await trio.sleep(0.4)
            await talk.send(talk.frame("SEND", b"%d" % number, destination=destination.replace("#", "x")))
        assert 10 <= stomp.context.heartbeats.sent <= 14


async def test_who_wants_none_gets_none(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for talk in (await stomp.connect(), await stomp.connect(V1_0), await stomp.connect(heart_beat="1000,0")):
            assert not talk.wire.waiting()  # type: ignore[attr-defined]
        await trio.sleep(1)
        assert stomp.context.heartbeats.sent == 0
        assert len(stomp.context.heartbeats) == 0


async def test_a_silent_client_is_told_and_disconnected(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(heart_beat="1000,0")
        await talk.subscribe("/queue/a", "client-individual")
        await talk.publish("/queue/a", b"x")
        began = trio.current_time()
        await talk.messages(1)
        error = await talk.error()
        assert "nothing was heard" in error["message"]
        assert 1.9 < trio.current_time() - began < 2.2
        other = await stomp.connect()
        await other.subscribe("/queue/a")
        assert await other.bodies(1) == [b"x"]


async def test_a_client_that_sends_line_ends_stays(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(heart_beat="1000,0")
        for _ in range(20):
            await trio.sleep(1.5)
            await talk.send(b"\n")
        await talk.publish("/queue/a", b"x")
        assert [record.body for record in stomp.records("a")] == [b"x"]


async def test_who_does_not_promise_heart_beats_may_be_silent(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(heart_beat="0,0")
        await trio.sleep(10_000)
        await talk.publish("/queue/a", b"x")
        assert [record.body for record in stomp.records("a")] == [b"x"]


async def test_a_heart_beat_waits_for_no_other_client(autojump_clock: MockClock) -> None:
    heartbeats, peers = Heartbeats(), [RecordingPeer() for _ in range(3 * BEATS_A_TURN)]
    for peer in peers:
        heartbeats.begin(peer, 1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heartbeats.run)
        await trio.sleep(10)
        assert {bytes(peer.sent) for peer in peers} == {b"\n" * 10}
        nursery.cancel_scope.cancel()


async def test_one_that_comes_late_does_not_delay_the_next(autojump_clock: MockClock) -> None:
    heartbeats, peer = Heartbeats(), RecordingPeer()
    heartbeats.begin(peer, 1000)
    heartbeats._beat_some(trio.current_time() + 1.0)
    assert bytes(peer.sent) == b"\n"
    heartbeats._beat_some(trio.current_time() + 1.91)
    assert bytes(peer.sent) == b"\n\n"
    heartbeats._beat_some(trio.current_time() + 10.0)  # it stood still for long
    heartbeats._beat_some(trio.current_time() + 10.2)
    assert bytes(peer.sent) == b"\n\n\n"
    heartbeats._beat_some(trio.current_time() + 10.6)
    assert bytes(peer.sent) == b"\n\n\n\n"


async def test_clients_that_come_and_go_leave_nothing_behind(autojump_clock: MockClock) -> None:
    heartbeats = Heartbeats()
    kept = [heartbeats.begin(RecordingPeer(), 0x7FFF_FFFF) for _ in range(10)]
    for _ in range(5000):
        heartbeats.end(heartbeats.begin(RecordingPeer(), 0x7FFF_FFFF))
        assert len(heartbeats) == len(kept)
    for beat in (*kept, *kept):
        heartbeats.end(beat)
    assert len(heartbeats) == 0


async def test_the_broker_beats_no_faster_than_configured(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path, StompConfig(heartbeat_min_ms=2000)) as stomp:
        talk = await stomp.connect(heart_beat="0,100")
        assert 10 <= len(await beats_within(talk, 20)) <= 11
