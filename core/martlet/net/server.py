"""Listens on sockets, accepts connections within limits, and serves each until it closes.

The path of one socket read: the transport returns bytes, the connection decodes them to events, the handler handles
each event (`reader`). At the end of the round the store writes all appended records at once, and all answers of a peer
are sent at once, or held until the log is flushed (`rounds`, `peer`).
"""

import errno
import logging
import socket
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

import trio

from martlet.contracts import Handler, Identity, Protocol, Traffic
from martlet.errors import AddressUnavailable, ConfigError
from martlet.net.addresses import show_address, split_listen
from martlet.net.complaints import Complaints
from martlet.net.event_pump import PumpReading
from martlet.net.lingering import LingeringSockets
from martlet.net.logouts import LoggedIn
from martlet.net.opening.accepted import AcceptedSockets, NetworkLookup
from martlet.net.opening.openings import Authenticate
from martlet.net.origins import Origins, origin_of
from martlet.net.pace import Paces
from martlet.net.peer import CLOSED, CLOSING, FAREWELL_S, READ_ENDED, ServerPeer, Shared
from martlet.net.pending import PendingWork
from martlet.net.read_turns import CLOSES_A_TURN, ENDS_A_TURN, ReadTurns
from martlet.net.reader import SocketReader
from martlet.net.rounds import Rounds
from martlet.net.transports import SocketTransport, Transport
from martlet.runtime.stats import Stats
from martlet.runtime.steps import per_slice
from martlet.runtime.turns import Turns
from martlet.settings import ServerConfig
from martlet.store import Store

__all__ = ["Server", "listening_sockets"]

log = logging.getLogger("martlet.server")

ACCEPTS_AT_ONCE: Final = per_slice(us=15)
ACCEPT_AGAIN_S: Final = 0.1
BACKLOG: Final = 1024
EVERY_IPV4: Final = "0.0.0.0"
EVERY_IPV6: Final = "::"
LINGER_AT_STOP_S: Final = 0.2  # a responsive client closes within a round trip


@final
class Server:
    """Serves the protocols of plugins; owns all listening sockets and connections."""

    def __init__(
        self,
        config: ServerConfig,
        store: Store | None,
        stats: Stats,
        authenticate: Authenticate = lambda credentials, origin: Identity(),
        turns: Turns | None = None,
        clock: Callable[[], float] = time.thread_time,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        """Prepare to serve.

        Args:
          turns: the queue in which reads of very many requests wait for their next slice, with other long work.
          clock: measures how long a round works, in seconds of processor time; a simulation must not depend on that.
          now_ms: the wall clock, by which logins expire; without it they do not.
        """
        self.config = config
        self.pending: PendingWork[ServerPeer] = PendingWork()
        self._complaints = Complaints(log)
        self._arrivals = Complaints(log)  # logs departures as well; neither is a complaint
        self._rounds = Rounds(config, store, self.pending, clock)
        self._reader = SocketReader(config, self._rounds, self._complaints, authenticate, turns or Turns(), now_ms)
        self._end_turns = ReadTurns(ENDS_A_TURN)  # thousands may end at the same moment
        self._paces = Paces(self.pending)
        self._lingering = LingeringSockets()
        self._accepted = 0
        self._turned_away = 0
        self._gave_way = 0
        self._peers: dict[int, ServerPeer] = {}  # by id()
        self._with_task: set[ServerPeer] = set()  # peers with a task
        self._has_stopped = False
        self._origins: Origins[ServerPeer] = Origins()
        self._sockets = AcceptedSockets(config, self._complaints, self._origins.count, self._admit)
        self._shared: Shared | None = None  # set while it runs
        self._listeners: list[socket.socket] = []
        self._traffic: dict[Traffic, None] = {}  # the traffic of each protocol that has had a peer
        stats.add("server", self.statistics)

    # start and stop

    def bind(self, protocol: Protocol) -> list[socket.socket]:
        """Return a listening socket for each address of *protocol*.

        Calls ``protocol.bound`` with the actual address of the first one.

        Raises:
          AddressUnavailable: another process has a port, or the machine does not have an address.
          ConfigError: an address is invalid or not allowed.
        """
        listen = protocol.listen if protocol.listen_at is None else protocol.listen_at()
        try:
            listeners = listening_sockets(listen)
        except OSError as error:
            text = f"{protocol.name} cannot listen on {listen!r}; {error.strerror or error}"
            kind = AddressUnavailable if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else ConfigError
            raise kind(text) from error
        for listener in listeners:
            listener.setblocking(False)
            # Inherited by the listener's connections.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._listeners += listeners
        protocol.bound(show_address(*listeners[0].getsockname()[:2]))
        return listeners

    async def run(
        self,
        bound: Sequence[tuple[Protocol, Sequence[socket.socket]]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept and serve until cancelled."""
        close_turns = ReadTurns(CLOSES_A_TURN)
        try:
            async with trio.open_nursery() as nursery:
                self._shared = Shared(
                    self.pending,
                    self.config,
                    nursery,
                    self._paces,
                    introduced=self._log_introduced,
                    blocked=self._reader.openings.watch,
                    identified=self._reader.note_identity,
                    lost=self._reader.cancel_rest,
                    wait_close=close_turns.wait,
                )
                self._sockets.nursery = nursery
                nursery.start_soon(self._end_unattended)
                await nursery.start(self._reader.run_pump)
                await nursery.start(self._lingering.run)
                nursery.start_soon(self._reader.turns.run)
                nursery.start_soon(self._end_turns.run)
                nursery.start_soon(close_turns.run)
                nursery.start_soon(self._rounds.run)
                nursery.start_soon(self._reader.deadlines.run)
                nursery.start_soon(self._paces.run)
                for protocol, listeners in bound:
                    for listener in listeners:
                        nursery.start_soon(self._accept, protocol, listener)
                task_status.started()
        finally:
            self.stop_accepting()

    def stop_accepting(self, listener: socket.socket | None = None) -> None:
        """Close the listening sockets, or only *listener*; open connections are not affected."""
        for each in self._listeners if listener is None else [listener]:
            if each.fileno() >= 0:
                trio.lowlevel.notify_closing(each)
                each.close()
        self._listeners = [each for each in self._listeners if each.fileno() >= 0]

    async def wait_idle(self) -> None:
        """Return when all output was sent, and clients have had a moment to read it; the caller limits the wait."""
        for peer in list(self._peers.values()):
            await peer.wait_idle()
        with trio.move_on_after(LINGER_AT_STOP_S):
            await self._lingering.wait_none()

    def close_peers(self, reason: str, protocol: Protocol | None = None) -> None:
        """Close all peers, or those of *protocol*, after their output has been sent."""
        for peer in list(self._peers.values()):
            if protocol is None or peer.protocol is protocol:
                peer.close(reason)

    def logins(self) -> Iterator[LoggedIn]:
        """Yield the identity of each client, and what ends its connection; more may come and go meanwhile."""
        ids = array("Q", self._peers)  # a collection of garbage would look at each peer of a new list, which takes 7 ms
        return self._reader.logouts.of(peer for each in ids if (peer := self._peers.get(each)) is not None)

    # accepting

    async def _accept(self, protocol: Protocol, listener: socket.socket) -> None:
        has_failed, networks = False, NetworkLookup(protocol)
        while listener.fileno() >= 0:
            try:
                await trio.lowlevel.wait_readable(listener)
                for _ in range(ACCEPTS_AT_ONCE):
                    connected, name = listener.accept()
                    self._sockets.accept(networks, connected, name)
            except BlockingIOError:
                has_failed = False
            except trio.ClosedResourceError:
                return
            except OSError as error:
                if not has_failed:
                    log.warning("%s cannot accept connections, retrying; %s", protocol.name, error.strerror)
                has_failed = True
                await trio.sleep(ACCEPT_AGAIN_S)

    def _admit(self, protocol: Protocol, connected: socket.socket, address: str, host: bytes) -> None:
        """Serve *connected* if there is room for one more connection; otherwise close it."""
        if not self._has_room() and not self._make_room(address, origin_of(host)):
            connected.close()
            return
        try:
            transport = SocketTransport(connected, self._lingering)
        except OSError:  # the client has closed it already
            connected.close()
            return
        self.serve(protocol, transport, address, host)

    def _has_room(self) -> bool:
        """Return whether one more connection is allowed; close a lingering one for it if necessary."""
        room = self.config.connections_max - len(self._peers)
        return room > len(self._lingering) or (room > 0 and self._lingering.give_way())

    def _make_room(self, address: str, origin: bytes) -> bool:
        """Close a connection of the address with the most, to accept one of *origin*; return False if *origin* has as
        many.
        """
        limit = self.config.connections_max
        peer = self._origins.give_way(origin)
        if peer is None:
            self._turned_away += 1
            text = "%s rejected; %d connections are open, server.connections_max is %d"
            self._complaints.warn(text, address, len(self._peers), limit)
            return False
        self._gave_way += 1
        text = "%s closed for %s, whose address has fewer; server.connections_max is %d"
        self._complaints.warn(text, peer.shown, address, limit)
        peer.lose(TimeoutError("its address has the most connections, and another address needed one"))
        return True

    def serve(self, protocol: Protocol, transport: Transport, address: str, host: bytes) -> None:
        """Serve one connection over *transport* until it closes."""
        assert self._shared is not None
        self._accepted += 1
        try:
            peer = ServerPeer(protocol, transport, address, host, self._shared)
        except Exception:  # a bug in the protocol must cost only this connection
            log.exception("%s %s closed because of a bug", protocol.name, address)
            transport.close()
            return
        self._peers[id(peer)] = peer
        self._traffic[protocol.traffic] = None
        self._origins.add(peer, origin_of(host))
        log.debug("%s connected to %s", address, protocol.name)
        try:
            is_read = self._reader.begin(peer, self._handle_pump_stop)
        except Exception as error:
            peer.lose(error)
            self._free_peer(peer)
            return
        if self._has_stopped:
            self._free_peer(peer)
        elif not is_read:
            self._start_task(peer, None)

    def _log_introduced(self, peer: ServerPeer, details: str) -> None:
        """Log that the client of *peer* has connected, now that its name is known."""
        user = f"user {peer.identity.name!r}" if peer.identity.name else ""
        description = ", ".join(filter(None, (user, details)))
        self._arrivals.info("%s connected%s", peer.shown, f" ({description})" if description else "")

    def _log_departed(self, peer: ServerPeer) -> None:
        """Log why the connection of *peer* has ended."""
        reason = peer.reason
        if not reason and peer.state < CLOSING:
            reason = "the broker stopped" if self._has_stopped else "the connection ended without a goodbye"
        self._arrivals.info("%s disconnected; %s", peer.shown, reason or "it said goodbye")

    def _handle_pump_stop(self, reading: PumpReading) -> None:
        """React when the pump cannot continue with *reading*: an idle peer's end is handled at once, all else in a
        task.
        """
        peer = reading.peer
        if reading.ended and reading.events is None and peer.idle and not peer.slow_requests:
            self._free_peer(peer)
        elif peer.state is not CLOSED:
            self._start_task(peer, reading)

    def _start_task(self, peer: ServerPeer, reading: PumpReading | None) -> None:
        self._with_task.add(peer)
        peer.shared.nursery.start_soon(self._serve_in_task, peer, reading)

    async def _serve_in_task(self, peer: ServerPeer, reading: PumpReading | None) -> None:
        """Serve one connection in a task until the pump can read from it, or to its end."""
        pump_continues = False
        try:
            pump_continues = await self._reader.read(peer, reading)
            if not pump_continues:
                await self._end_turns.wait()
        finally:
            if pump_continues and not self._has_stopped:
                self._with_task.discard(peer)
            else:
                await self._end(peer)

    async def _end(self, peer: ServerPeer) -> None:
        """Send the last answers, then free the resources of *peer*."""
        peer.end_reading()
        half_closed = peer.state is READ_ENDED
        try:
            self._rounds.queue_output(peer)
            await peer.wait_idle(FAREWELL_S, slow_work=half_closed)
        finally:
            self._free_peer(peer)

    def _free_peer(self, peer: ServerPeer) -> None:
        """Free the resources of *peer*."""
        if peer.state is CLOSED:
            return
        peer.end_reading()
        if peer.client:
            self._log_departed(peer)
        self._peers.pop(id(peer), None)
        self._with_task.discard(peer)
        self._origins.remove(peer, origin_of(peer.host))
        self._reader.forget(peer)
        self._call_closed(peer, peer.end())
        log.debug("%s disconnected from %s; %s", peer.address, peer.protocol.name, peer.reason or "client closed")

    async def _end_unattended(self) -> None:
        """End the peers without a task when the server stops."""
        try:
            await trio.sleep_forever()
        finally:
            self._has_stopped = True
            for peer in list(self._peers.values()):
                if peer not in self._with_task:  # `Handler.closed` of another peer may have closed it
                    self._free_peer(peer)

    def _call_closed(self, peer: ServerPeer, handler: Handler) -> None:
        try:
            handler.closed(peer.reason)
        except Exception:  # a bug in the protocol must not leak the connection
            log.exception("%s %s failed while closing because of a bug", peer.protocol.name, peer.address)

    def statistics(self) -> dict[str, object]:
        reader, incomplete = self._reader, self._reader.incomplete
        return {
            "connections": len(self._peers),
            "lingering": len(self._lingering),
            "accepted": self._accepted,
            "connections_address": self._origins.largest(),
            "turned_away": self._turned_away,
            "gave_way": self._gave_way,
            **self._sockets.statistics(),
            "warnings_left_out": self._complaints.left_out,
            "logins_ended": reader.logouts.ended,
            "logins_expired": reader.logouts.expired,
            "protocol_errors": reader.protocol_errors,
            "bytes_in": sum(traffic.bytes_in for traffic in self._traffic),
            "bytes_out": sum(traffic.bytes_out for traffic in self._traffic),
            "unsent_bytes": self.pending.unsent_bytes,
            "incomplete_bytes": incomplete.total,
            "incomplete_address_bytes": incomplete.largest_origin(),
            "incomplete_closed": reader.incomplete_closed,
        }


def listening_sockets(listen: str) -> list[socket.socket]:
    """Return a listening socket for each address of *listen*; ``[::]`` takes IPv4 clients, too.

    ``[::]`` takes no IPv4 clients if *listen* also has ``0.0.0.0`` with the same port, or the system cannot do that.

    Raises:
      ConfigError: an address is invalid.
      OSError: an address cannot be bound.
    """
    addresses, sockets = split_listen(listen), list[socket.socket]()
    try:
        for host, port in addresses:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            is_dual = host == EVERY_IPV6 and (EVERY_IPV4, port) not in addresses and socket.has_dualstack_ipv6()
            sockets.append(socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual))
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets
