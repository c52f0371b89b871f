"""Reads from connections: decodes bytes to events, passes events to the handler, and ends the round.

While a client does not read its answers, the server stops reading its requests, so that its unsent output stays
near `ServerConfig.unsent_bytes_max`. It also pauses if a quota of the client is used up (`pace.py`).
"""

import logging
import math
import select
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, final

import trio

from martlet.errors import LocalProtocolError, MartletError, RemoteProtocolError
from martlet.net.complaints import Complaints
from martlet.net.deadlines import Deadlines
from martlet.net.event_pump import EventPump, PumpReading
from martlet.net.incomplete import IncompleteRequests
from martlet.net.logouts import Logouts
from martlet.net.opening.openings import Authenticate, Openings
from martlet.net.origins import origin_of
from martlet.net.pace import RECEIVE_BYTES
from martlet.net.peer import CLOSING, LOST, ServerPeer
from martlet.net.read_turns import ReadTurns
from martlet.net.rounds import Rounds
from martlet.net.transports import SocketTransport
from martlet.runtime.turns import Turns
from martlet.settings import ServerConfig

__all__ = ["SocketReader"]

log = logging.getLogger("martlet.server")

# Events of one peer that are handled in one turn of the event loop. An event of MQTT takes from 12 us for a ping to 100
# us for a message outside a run, and one read can bring 131,072 pings.
EVENTS_A_TURN: Final = 96


@final
class SocketReader:
    """Reads from all peers of a server."""

    def __init__(
        self,
        config: ServerConfig,
        rounds: Rounds,
        complaints: Complaints,
        authenticate: Authenticate,
        work: Turns,
        now_ms: Callable[[], int],
    ) -> None:
        self._config = config
        self._rounds = rounds
        self._complaints = complaints
        self._work = work
        # Size of answers after which the reader checks whether the peer accepts output.
        self._look_bytes = config.unsent_bytes_max // 8
        self.pump: EventPump[PumpReading] | None = None  # set while the pump runs
        self.turns = ReadTurns()  # for peers that the pump does not read from
        self.openings = Openings(authenticate, self._receive_some)
        self._rest_scopes: dict[ServerPeer, trio.CancelScope] = {}  # of the rests of unfinished requests
        self._in_line: set[ServerPeer] = set()  # peers whose read waits until the server has done something else
        self.deadlines = Deadlines(self._deadline_passed)
        self.logouts = Logouts(rounds, now_ms, self.cancel_rest)
        self.incomplete: IncompleteRequests[ServerPeer] = IncompleteRequests(
            config.incomplete_total_bytes_max, config.incomplete_address_bytes_max
        )
        self.incomplete_closed = 0
        self.protocol_errors = 0

    def begin(self, peer: ServerPeer, attend: Callable[[PumpReading], None]) -> bool:
        """Let the pump read from *peer*; return False if it cannot, and `read` is needed.

        *attend* is called when the pump cannot continue: *peer* has ended, or needs a task that calls `read`.
        """
        self.deadlines.watch(peer)
        transport = peer.transport
        if self.pump is None or not isinstance(transport, SocketTransport) or peer.upgrade is not None:
            return False
        reading = PumpReading(peer, self.pump, transport.fileno(), attend)
        reading.watch()
        transport.on_close = reading.close
        return True

    def note_identity(self, peer: ServerPeer) -> None:
        """Watch when the login of *peer* expires, or no longer."""
        self.logouts.note_identity(peer)
        self.deadlines.watch_expiry(peer)

    def forget(self, peer: ServerPeer) -> None:
        """Drop all state kept for *peer*, which has ended."""
        self.deadlines.forget(peer)
        self.incomplete.forget(peer)
        self._in_line.discard(peer)
        self._rest_scopes.pop(peer, None)

    async def read(self, peer: ServerPeer, reading: PumpReading | None) -> bool:
        """Read until the client's side ends, or an error occurs; an error closes only this connection.

        With *reading*, handle the reason why the pump stopped. Return True if the pump continues to read, False at the
        end.
        """
        try:
            if reading is None and peer.upgrade is not None:
                await self._upgrade(peer, iter(()))
                await self._read_to_end(peer)
            elif reading is None:
                await self._read(peer, await self._receive_some(peer))
            elif reading.first is None:
                return await self._continue_reading(peer, reading)
            else:
                first, reading.first = reading.first, None
                await self._wait_turn(peer)
                await self._read(peer, first)
        except Exception as error:
            self._end_after_error(peer, error)
        return False

    async def _continue_reading(self, peer: ServerPeer, reading: PumpReading) -> bool:
        """Finish the read at which the pump stopped; return True if the pump continues to read."""
        if reading.events is not None:
            events, reading.events = reading.events, None
            unfinished, reading.unfinished = reading.unfinished, False
            await self._handle_remaining(peer, events, unfinished, reading.received, reading.now)
            self._finish_read(peer, reading.received, reading.now)
            del events
            if peer.encrypted:  # since `_handle_remaining`: the pump reads plain text only
                await self._read_to_end(peer)
                return False
        if peer.over:
            await peer.wait_room()
        if reading.ended or peer.state >= CLOSING:
            return False
        if reading.closed:
            raise trio.ClosedResourceError("the socket was closed here")
        reading.watch()
        return True

    def _end_after_error(self, peer: ServerPeer, error: Exception) -> None:
        """End *peer* after *error*, raised while reading from it or handling its requests."""
        self._rounds.call_before_commit()  # so that its last packet comes after the answers to earlier requests
        if isinstance(error, RemoteProtocolError):
            self.protocol_errors += 1
            peer.reason = str(error)
            self._complaints.warn("%s closed; %s", peer.shown, error)
            peer.send(peer.connection.farewell(error))
        elif isinstance(error, OSError | ssl.SSLError | trio.ClosedResourceError):
            peer.lose(error)
        elif isinstance(error, MartletError):
            peer.reason = str(error)
            log.error("%s closed; %s", peer.shown, error)
        else:
            peer.fail(error)

    async def _read(self, peer: ServerPeer, first: bytes) -> None:
        """Read in this task; *first* are the first bytes."""
        first = await self.openings.open(peer, first)
        if first:
            await self._handle_data(peer, first)
        first = b""  # otherwise every idle connection keeps its first bytes in memory
        await self._read_to_end(peer)

    async def _read_to_end(self, peer: ServerPeer) -> None:
        """Read in this task after the first bytes, to the end."""
        while peer.state < CLOSING:
            await peer.transport.wait_readable()
            await self._wait_turn(peer)
            data = peer.transport.receive(_receive_bytes(peer))
            if data is None:
                if peer.transport.pending():
                    peer.drain()
                continue
            if not data or peer.state >= CLOSING:
                return
            await self._handle_data(peer, data)
            del data  # otherwise every idle connection keeps its last bytes in memory

    async def _upgrade(self, peer: ServerPeer, events: Iterator[Any]) -> None:
        """Begin TLS, which the handler asked for."""
        self._in_line.discard(peer)
        self.deadlines.watch(peer)
        has_more = next(events, None) is not None or peer.connection.buffered_bytes > 0
        await self.openings.upgrade(peer, has_more=has_more)

    async def _receive_some(self, peer: ServerPeer) -> bytes:
        """Return the next bytes from the transport; empty at the end."""
        while True:
            await peer.transport.wait_readable()
            await self._wait_turn(peer)
            data = peer.transport.receive(_receive_bytes(peer))
            if data is not None:
                return data
            if peer.transport.pending():
                peer.drain()

    async def _wait_turn(self, peer: ServerPeer) -> None:
        """Return when it is the turn of *peer*, which is readable."""
        self._in_line.add(peer)
        try:
            await self.turns.wait()
            if self.turns.had_large:
                await self._work.wait()
        finally:
            self._in_line.discard(peer)
        self.deadlines.watch(peer)  # the deadline may have passed during the wait

    # reading by the pump

    async def run_pump(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the pump, which reads from plain sockets; without epoll (macOS) each peer has its own task."""
        if not hasattr(select, "epoll"):
            task_status.started()
            return
        self.pump = EventPump(self._rounds, self._read_in_round)
        task_status.started()
        try:
            with self._rounds.flushes_watched(self.pump):
                await self.pump.run()
        finally:
            self.pump = None

    def _read_in_round(self, reading: PumpReading) -> None:
        """Read once and handle complete requests, in a round of the pump."""
        peer = reading.peer
        reading.in_round = True
        try:
            data = peer.transport.receive(_receive_bytes(peer))
            if data is None:
                return
            if not data or peer.state >= CLOSING:
                reading.ended = True
            elif reading.plain or self.openings.is_plain(peer, data):
                reading.plain = True
                self._handle_in_round(reading, data)
            else:
                reading.first = data
        except Exception as error:
            self._end_after_error(peer, error)
            reading.ended = True
        finally:
            reading.in_round = False
        reading.ended = reading.ended or peer.state >= CLOSING
        if reading.first is not None or reading.events is not None:
            self._in_line.add(peer)
        if reading.ended or reading.first is not None or reading.events is not None or peer.over:
            reading.stop()

    def _handle_in_round(self, reading: PumpReading, data: bytes) -> None:
        peer = reading.peer
        now = self._rounds.now
        peer.protocol.traffic.bytes_in += len(data)
        peer.connection.receive_data(data, now)
        events = iter(peer.connection.events())
        unfinished = self._handle(peer, events)
        if unfinished is True:
            self._finish_read(peer, len(data), now)
        else:
            reading.events, reading.unfinished, reading.received, reading.now = events, unfinished, len(data), now

    def _finish_read(self, peer: ServerPeer, received: int, now: float) -> None:
        """Finish a read of *received* bytes, whose complete requests have all been handled."""
        size = peer.connection.buffered_bytes
        if size or self.incomplete.total:
            self._note_incomplete(peer, size, received, now)
        self.deadlines.watch(peer)

    async def _handle_data(self, peer: ServerPeer, data: bytes) -> None:
        """Handle all requests that *data* completes, and send their answers together."""
        self._rounds.begin()
        now = self._rounds.now
        peer.protocol.traffic.bytes_in += len(data)
        try:
            peer.connection.receive_data(data, now)
            events = iter(peer.connection.events())
            unfinished = self._handle(peer, events)
        finally:
            self._rounds.end()
        if unfinished is not True:
            self.turns.had_large = True
            await self._handle_remaining(peer, events, unfinished, len(data), now)
        self._finish_read(peer, len(data), now)
        if peer.over:
            await peer.wait_room()

    def _handle(self, peer: ServerPeer, events: Iterator[Any]) -> Awaitable[None] | bool:
        """Handle *events*; return True if all were handled, or else what must be awaited before the next one.

        That is the rest of a request, or False for room in the output, TLS, a pause, or the turn of others.
        """
        handle, events_left = peer.handler.handle, EVENTS_A_TURN
        for event in events:
            rest = handle(event)
            if rest is not None:
                return rest
            if peer.answers is not None and peer.answers.size > self._look_bytes and peer.over:
                return False
            if peer.stops:
                if peer.state >= CLOSING:
                    break
                return False
            events_left -= 1
            if not events_left:
                return False
        return True

    async def _handle_remaining(
        self, peer: ServerPeer, events: Iterator[Any], unfinished: Awaitable[None] | bool, received: int, now: float
    ) -> None:
        """Wait for *unfinished*, the result of `_handle`, and handle the remaining *events*."""
        self._in_line.add(peer)
        try:
            while unfinished is not True:
                rest, unfinished = unfinished, False
                if rest is not False:
                    await self._wait_unfinished(peer, rest)
                elif peer.upgrade is not None:
                    await self._upgrade(peer, events)
                    return
                elif peer.own_pace is not None and peer.own_pace.read_at:
                    self.incomplete.forget(peer)  # the server makes the rest of its request wait
                    await peer.wait_pace()
                elif peer.over:
                    self._note_incomplete(peer, peer.connection.buffered_bytes, received, now)
                    await self._wait_room(peer)
                else:
                    await self._work.wait()
                if peer.state >= CLOSING:
                    return
                if peer.upgrade is not None or (peer.own_pace is not None and peer.own_pace.read_at):
                    continue
                self._rounds.begin()
                try:
                    unfinished = self._handle(peer, events)
                finally:
                    self._rounds.end()
        finally:
            self._in_line.discard(peer)

    async def _wait_room(self, peer: ServerPeer) -> None:
        """Wait until *peer* has read part of its answers; its deadline counts meanwhile."""
        self._in_line.discard(peer)
        self.deadlines.watch(peer)
        await peer.wait_room()
        self._in_line.add(peer)

    async def _wait_unfinished(self, peer: ServerPeer, rest: Awaitable[None]) -> None:
        """Wait for the unfinished part of a request; earlier answers are sent, later requests of this peer wait."""
        scope = self._rest_scopes[peer] = trio.CancelScope()
        if peer.state >= LOST:
            scope.cancel()
        with scope:
            await rest
        del self._rest_scopes[peer]

    def cancel_rest(self, peer: ServerPeer) -> None:
        """Cancel the unfinished request of *peer*, which is lost."""
        scope = self._rest_scopes.get(peer)
        if scope is not None:
            scope.cancel()

    def _note_incomplete(self, peer: ServerPeer, size: int, received: int, now: float) -> None:
        """Note that *size* bytes of *peer* are incomplete; if a limit is exceeded, close the slowest peers."""
        requests = self.incomplete
        if not size and (not requests.total or peer not in requests):
            return
        origin = origin_of(peer.host)
        requests.note(peer, origin, size, received, now)
        if requests.over(origin):
            self._close_slow(peer)

    def _close_slow(self, peer: ServerPeer) -> None:
        """Close the connections with the oldest incomplete requests, because *peer* exceeded a limit."""
        requests, config = self.incomplete, self._config
        origin = origin_of(peer.host)
        held_total, held_by_address = requests.total, requests.held_by(origin)
        slow_peers = requests.give_way(origin)
        self.incomplete_closed += len(slow_peers)
        self._complaints.warn(
            "%d connections closed because they sent requests most slowly, %s first; incomplete requests used "
            "%d bytes and those from the address of %s %d, server.incomplete_total_bytes_max is %d and "
            "server.incomplete_address_bytes_max %d",
            len(slow_peers),
            slow_peers[0].address,
            held_total,
            peer.address,
            held_by_address,
            config.incomplete_total_bytes_max,
            config.incomplete_address_bytes_max,
        )
        for each in slow_peers:
            each.lose(TimeoutError("it sent its request too slowly when too many requests were incomplete"))

    def _deadline_passed(self, peer: ServerPeer, now: float) -> None:
        """End the login of *peer*, or let its connection handle its deadline, if that has really passed."""
        if peer.expires_at <= now and peer.state < CLOSING:
            self.logouts.expire(peer)
        if peer.state >= CLOSING:
            return
        if peer in self._rest_scopes or peer in self._in_line:  # watched again after that
            if peer.expires_at < math.inf:
                self.deadlines.watch_expiry(peer)
            return
        self._rounds.begin()
        try:
            if self._read_received(peer) and peer.deadline <= now:
                peer.connection.handle_timeout(now)
                for event in peer.connection.events():
                    if peer.handler.handle(event) is not None:
                        raise LocalProtocolError("an event of a timeout must be handled without waiting")
        except RemoteProtocolError as error:
            self.protocol_errors += 1
            peer.send(peer.connection.farewell(error))
            peer.close(str(error))
        except MartletError as error:
            peer.close(str(error))
        except Exception as error:
            peer.fail(error)
        finally:
            self._rounds.end()
        self.deadlines.watch(peer)

    def _read_received(self, peer: ServerPeer) -> bool:
        """Read bytes already received from *peer*: a busy server must not close a client whose request waits to be
        read.

        Return False if the peer has ended, or a task takes care of it now.
        """
        transport = peer.transport
        if self.pump is not None and isinstance(transport, SocketTransport):
            reading = self.pump.watched(transport.fileno())
            if reading is not None:
                self._read_in_round(reading)
                return not reading.attended and peer.state < CLOSING
        return True


def _receive_bytes(peer: ServerPeer) -> int:
    """Return how much to read from *peer* at once."""
    return RECEIVE_BYTES if peer.own_pace is None else peer.own_pace.receive_bytes
