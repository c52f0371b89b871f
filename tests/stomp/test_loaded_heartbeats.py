"""Heart-beats on a broker that is never idle, by a clock that only its work moves on."""

import socket
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from tests.net.test_event_pump import send
from tests.wire_clients.stomp import StompPort, frame, stomp_port
from trio.testing import MockClock

from martlet.contracts import Peer
from martlet.net import event_pump
from martlet_stomp.handler import StompHandler
from martlet_stomp.shared.heartbeats import Beat
from martlet_stomp.wire.packets import Event, SendRun

INTERVAL_S = 1.0
WORK_S = 0.01  # what a piece of work may take, and all the time takes here
BUSY, IDLE = 10, 20
RUNS = 3000


@contextmanager
def clients_of(port: StompPort, count: int, **headers: str) -> Iterator[list[socket.socket]]:
    """Connections that have sent CONNECT."""
    host, _, number = port.address.rpartition(":")
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_connection((host, int(number)))) for _ in range(count)]
        for each in found:
            each.sendall(frame("CONNECT", accept_version="1.2", host="h", **headers))
            each.setblocking(False)
        yield found


class Recorder:
    """Notes when heart-beats are sent to a peer."""

    def __init__(self, beat: Beat) -> None:
        self._peer = beat.peer
        self.times = [beat.sent_at]
        beat.peer = cast("Peer", self)

    def send(self, data: bytes) -> None:
        self.times.append(trio.current_time())
        self._peer.send(data)

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


class Load:
    """One-to-one: each busy client has a queue, of which the next message is sent when one was handled."""

    def __init__(self, clock: MockClock, busy: list[socket.socket], idle: list[socket.socket]) -> None:
        self._clock = clock
        self._idle = idle
        self._next_beats = trio.current_time()
        self.busy = dict(enumerate(busy))
        self.runs = 0
        self.done = trio.Event()

    def begin(self) -> None:
        for number, client in self.busy.items():
            client.send(frame("SUBSCRIBE", id="0", destination=f"/queue/q{number}"))
            self.send(number)

    def send(self, number: int) -> None:
        client = self.busy[number]
        with suppress(BlockingIOError):
            while client.recv(1 << 16):
                pass
        client.send(frame("SEND", b"%d" % number, destination=f"/queue/q{number}"))

    def worked(self, run: SendRun) -> None:
        """Note that the broker has handled *run*."""
        self.runs += 1
        self._clock.jump(WORK_S)
        now = trio.current_time()
        if now >= self._next_beats:  # clients are as punctual as they have to be
            self._next_beats = now + INTERVAL_S
            for client in self._idle:
                client.send(b"\n")
        if self.runs >= RUNS:
            self.done.set()
            return
        for body in run.bodies:
            self.send(int(body))


@pytest.fixture
def work_clock(monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock) -> MockClock:
    """The clock of trio, by which the pump measures its turns, too."""
    monkeypatch.setattr(event_pump, "time", SimpleNamespace(perf_counter=mock_clock.current_time))
    return mock_clock


async def wait_clients(port: StompPort, count: int) -> None:
    while len(port.broker.context.clients) < count:
        await trio.lowlevel.checkpoint()


async def test_heart_beats_are_on_time_however_busy_the_broker_is(
    tmp_path: Path, work_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the broker deviate by less than a tenth of the interval, and a client that sends its own stays."""
    handle = StompHandler.handle
    load: Load | None = None

    def counted(handler: StompHandler, event: Event) -> Awaitable[None] | None:
        answer = handle(handler, event)
        if load is not None and isinstance(event, SendRun):
            load.worked(event)
        return answer

    monkeypatch.setattr(StompHandler, "handle", counted)
    async with stomp_port(tmp_path) as port:
        with clients_of(port, IDLE, heart_beat="1000,1000") as idle, clients_of(port, BUSY) as busy:
            await wait_clients(port, IDLE + BUSY)
            recorders = [Recorder(beat) for beat in port.broker.context.heartbeats._alarms._entries]
            load = Load(work_clock, busy, idle)
            load.begin()
            await load.done.wait()
            gaps = [gap for recorder in recorders for gap in recorder.gaps()]
            assert len(gaps) >= IDLE * (RUNS * WORK_S / INTERVAL_S - 1)
            assert all(0.9 * INTERVAL_S < gap <= INTERVAL_S for gap in gaps), (min(gaps), max(gaps))
            # A broker that stands still for long reads what has come before it says that nothing has.
            for client in idle:
                send(client, b"\n")
            work_clock.jump(100 * INTERVAL_S)
            await trio.testing.wait_all_tasks_blocked()
            assert len(port.broker.context.clients) == IDLE + BUSY
