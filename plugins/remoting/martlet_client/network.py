"""The common part of producers and consumers: connections, routes, heartbeats, opening and closing.

Every client object owns one `Network`. Its tasks run in their own nursery, which
outlives cancellation of the caller for a moment: so an interrupted program still
commits its offsets and leaves its group.
"""

import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Final, Self, TypeAlias, final

import trio
from msgspec import Struct, field

from martlet.errors import MartletError
from martlet.runtime.clock import Clock, SystemClock
from martlet_client.arguments import check_callable, check_seconds, check_type, check_utf8
from martlet_client.identity import ClientIdentity
from martlet_client.link import Answer, Handle, Link
from martlet_client.outages import Outages, level_of
from martlet_remoting.dialing import encrypted, why_not_opened
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import (
    BadAddress,
    BrokerError,
    ClientClosed,
    ClientError,
    ConnectionLost,
    NameServerUnreachable,
    RequestTimeout,
    RouteNotFound,
)
from martlet_remoting.wire.codes import REQUEST_NAMES, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.routes import TopicRoute, decode_route
from martlet_remoting.wire.signatures import SigningKey

__all__ = ["ClientSettings", "Network", "NetworkClient"]

log = logging.getLogger(__name__)

Connect: TypeAlias = Callable[[str, int], Awaitable[trio.abc.Stream]]

# The route of this topic names the brokers that may create new topics.
TEMPLATE_TOPIC: Final = "TBW102"
ADDRESS_EXAMPLE: Final = "write HOST:PORT, for example 127.0.0.1:9876"
PORT_MAX: Final = 65535
# What every name server answers, and no broker.
OF_NAME_SERVERS: Final = frozenset(
    (
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    )
)
BROKERS_PORT: Final = "; this is the port of a broker: give that of a name server, which is usually 9876"


async def connect_tcp(host: str, port: int) -> trio.abc.Stream:
    """Return a TCP connection; the default of `ClientSettings.connect`."""
    return await trio.open_tcp_stream(host, port)


@final
class ClientSettings(Struct, frozen=True):
    """Options of the connections of any client; the defaults are those of RocketMQ's Java client.

    Args:
      name_server: ``host:port``, several separated by ``;``.
      client_id: how brokers list this client; it must be unique in a group. Generated when empty.
      request_timeout_s: how long to wait for the answer to one request.
      connect_timeout_s: how long opening one connection may take.
      heartbeat_interval_s: how often the client sends heartbeats to brokers.
      route_interval_s: how often routes are fetched again.
      close_timeout_s: how long closing may take.
      tls: encrypts every connection, to name servers and to brokers.
      signing_key: signs every request, as RocketMQ's AclClientRPCHook does; for brokers with access control.
      connect: opens a connection; tests pass one that works in memory.
      clock: provides the time of day; tests pass their own.

    Raises:
      TypeError, ValueError: an argument is wrong.
      BadAddress: ``name_server`` has no address, or a malformed one; raised by the client that uses the settings.
    """

    name_server: str
    client_id: str = ""
    request_timeout_s: float = 3.0
    connect_timeout_s: float = 3.0
    heartbeat_interval_s: float = 30.0
    route_interval_s: float = 30.0
    close_timeout_s: float = 5.0
    tls: ssl.SSLContext | None = None
    signing_key: SigningKey | None = None
    connect: Connect = connect_tcp
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        check_type("name_server", self.name_server, str, "for example '127.0.0.1:9876'; join several with ';'")
        check_type("client_id", self.client_id, str)
        check_utf8("client_id", self.client_id)
        for name in ("request", "connect", "close"):
            check_seconds(f"{name}_timeout_s", getattr(self, f"{name}_timeout_s"))
        for name in ("heartbeat", "route"):
            check_seconds(f"{name}_interval_s", getattr(self, f"{name}_interval_s"))
        if self.tls is not None:
            check_type("tls", self.tls, ssl.SSLContext, "for example ssl.create_default_context()")
        if self.signing_key is not None:
            check_type("signing_key", self.signing_key, SigningKey, "SigningKey(access_key, secret)")
        check_callable("connect", self.connect, "async def connect(host: str, port: int) -> trio.abc.Stream", 2)
        check_callable("clock.now_ms", getattr(self.clock, "now_ms", None), "def now_ms() -> int", 0)

    @classmethod
    def of(cls, name_server: "str | ClientSettings") -> "ClientSettings":
        """Return *name_server* if it is settings, else default settings with this name server."""
        return name_server if isinstance(name_server, ClientSettings) else cls(name_server)

    def name_servers(self) -> list[str]:
        """Return the addresses in ``name_server``; raises BadAddress if there is none, or a malformed one."""
        addresses = [address.strip() for address in self.name_server.replace(",", ";").split(";") if address.strip()]
        if not addresses:
            raise BadAddress(f"name server {self.name_server!r} is empty; {ADDRESS_EXAMPLE}")
        for address in addresses:
            split_address(address)
        return addresses


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[v6]:port``; raises BadAddress otherwise."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or "/" in host or not (port.isascii() and port.isdecimal()):
        raise BadAddress(f"address {address!r} is not a host and a port; {ADDRESS_EXAMPLE}")
    if not 0 < int(port) <= PORT_MAX:
        raise BadAddress(f"address {address!r} has an invalid port; use 1 to {PORT_MAX}")
    return host.strip("[]"), int(port)


@final
class _Opening:
    """An attempt to open a connection, shared by all callers that wait for it; *why* is set if it failed."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.link: Link | None = None
        self.why = "cannot be opened: the client closes"


@final
class Network:
    """Connections by address and routes by topic; `start` keeps both fresh."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.clock = settings.clock
        self.identity = ClientIdentity(settings.clock, settings.client_id)
        self.handlers: dict[int, Handle] = {}
        self.heartbeat: Callable[[], bytes | None] = lambda: None
        self.routes_changed: Callable[[], None] = lambda: None
        self.routes: dict[str, TopicRoute] = {}
        self._links: dict[str, Link] = {}
        self._openings: dict[str, _Opening] = {}
        self._name_servers = settings.name_servers()
        self._outages = Outages()
        self._nursery: trio.Nursery | None = None

    @property
    def client_id(self) -> str:
        """How brokers list this client."""
        return self.identity.client_id

    def start(self, nursery: trio.Nursery) -> None:
        """Refresh routes and send heartbeats until *nursery* ends."""
        self._nursery = nursery
        nursery.start_soon(self._refresh_routes)
        nursery.start_soon(self._send_heartbeats)

    def stop(self) -> None:
        """Open no more connections."""
        self._nursery = None

    async def _refresh_routes(self) -> None:
        while True:
            await trio.sleep(self.settings.route_interval_s)
            for topic in list(self.routes):
                try:
                    await self.fetch_route(topic)
                except ClientError as error:
                    log.log(level_of(error), "route of topic %r was not refreshed: %s", topic, error)

    async def _send_heartbeats(self) -> None:
        while True:
            await trio.sleep(self.settings.heartbeat_interval_s)
            await self.send_heartbeats()

    async def send_heartbeats(self) -> None:
        """Send a heartbeat to every broker of every known route; failures are logged, as the next beat comes soon."""
        body = self.heartbeat()
        if body is None:
            return
        async with trio.open_nursery() as nursery:
            for address in self.broker_addresses():
                nursery.start_soon(self._send_heartbeat, address, body)

    async def _send_heartbeat(self, address: str, body: bytes) -> None:
        try:
            await self.ask(address, RequestCode.HEART_BEAT, {}, body)
        except ClientError as error:
            log.log(level_of(error), "heartbeat failed: %s", error)
            self._give_up_silent(address, error)

    def _give_up_silent(self, address: str, error: ClientError) -> None:
        """Close a connection on which no answer comes: the other side may have died silently."""
        link = self._links.get(address)
        if link is not None and isinstance(error, RequestTimeout):
            link.close("was closed: the other side does not answer")

    def broker_addresses(self) -> list[str]:
        """Return the address of every broker of every known route, once each."""
        return sorted({address for route in self.routes.values() for address in route.addresses()})

    def connected_brokers(self) -> list[str]:
        """Return the addresses of brokers with an open connection."""
        return [
            address for address in self.broker_addresses() if (link := self._links.get(address)) and not link.closed
        ]

    async def link(self, address: str) -> Link:
        """Return the connection to *address*, opened if necessary; concurrent callers share one attempt.

        Raises:
          ConnectionLost: it cannot be opened in time.
        """
        link = self._links.get(address)
        if link is not None and not link.closed:
            return link
        opening = self._openings.get(address)
        if opening is None:
            if self._nursery is None:
                raise ClientClosed("client is not open; enter it with 'async with' first")
            opening = self._openings[address] = _Opening()
            self._nursery.start_soon(self._open_and_introduce, address, opening)
        await opening.over.wait()
        if opening.link is None:
            raise ConnectionLost(address, opening.why)
        return opening.link

    async def _open_and_introduce(self, address: str, opening: "_Opening") -> None:
        try:
            link = await self._open(address)
            await self._introduce(link)
            opening.link = self._links[address] = link
        except ClientError as error:
            opening.why = error.why if isinstance(error, ConnectionLost) else str(error)
        finally:
            del self._openings[address]
            opening.over.set()

    async def _introduce(self, link: Link) -> None:
        """Send a heartbeat before any other request: the broker forgot this client when the last connection ended."""
        body = self.heartbeat()
        if body is None or link.address not in self.broker_addresses():
            return
        try:
            await link.ask(RequestCode.HEART_BEAT, {}, body, self.settings.request_timeout_s)
        except ClientError as error:
            log.log(level_of(error), "heartbeat failed: %s", error)

    async def _open(self, address: str) -> Link:
        if self._nursery is None:
            raise ClientClosed("client is not open; enter it with 'async with' first")
        try:
            host, port = split_address(address)
            with trio.fail_after(self.settings.connect_timeout_s):
                stream = await self.settings.connect(host, port)
                if self.settings.tls is not None:
                    stream = await encrypted(stream, self.settings.tls, host)
        except (OSError, ValueError, trio.TooSlowError, trio.BrokenResourceError) as error:
            raise ConnectionLost(address, f"cannot be opened: {why_not_opened(error)}") from error
        link = Link(stream, address, self._handle, self.settings.signing_key)
        self._nursery.start_soon(link.run)
        return link

    async def _handle(self, command: Command) -> Answer:
        handler = self.handlers.get(command.code)
        if handler is None:
            return Answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"request {command.code} is not supported")
        try:
            return await handler(command)
        except MartletError as error:
            # The broker sent a bad request: it gets the error text, and no traceback is logged.
            return Answer(ResponseCode.SYSTEM_ERROR, remark=str(error))
        except Exception as error:
            log.exception("request %s of a broker failed", REQUEST_NAMES.get(command.code, str(command.code)))
            return Answer(ResponseCode.SYSTEM_ERROR, remark=f"{type(error).__name__}: {error}")

    async def ask_any(
        self,
        address: str,
        code: int,
        ext: Mapping[str, object],
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> Command:
        """Return the answer of *address*, whatever its code."""
        server = "name server" if address in self._name_servers else "broker"
        try:
            answer = await self._ask_any(address, code, ext, body, timeout_s)
        except (ConnectionLost, RequestTimeout) as error:
            if self._nursery is not None:  # else the client closes
                self._outages.failed(server, address, error)
            raise
        self._outages.answered(server, address)
        return answer

    async def _ask_any(
        self, address: str, code: int, ext: Mapping[str, object], body: bytes, timeout_s: float | None
    ) -> Command:
        timeout_s = self.settings.request_timeout_s if timeout_s is None else timeout_s
        link = self._links.get(address)
        if link is not None and not link.closed:
            return await link.ask(code, ext, body, timeout_s)
        deadline = trio.current_time() + timeout_s
        with trio.move_on_at(deadline) as scope:
            link = await self.link(address)
        if link is None or scope.cancelled_caught:
            raise ConnectionLost(address, f"was not opened within {timeout_s:g} s")
        return await link.ask(code, ext, body, deadline - trio.current_time())

    async def ask(
        self,
        address: str,
        code: int,
        ext: Mapping[str, object],
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> Command:
        """Return the answer of *address* if it is a success.

        Raises:
          BrokerError: the answer has an error code.
        """
        answer = await self.ask_any(address, code, ext, body, timeout_s)
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark or "", address)
        return answer

    async def tell(self, address: str, code: int, ext: Mapping[str, object], body: bytes = b"") -> None:
        """Send *address* a request that gets no answer."""
        link = await self.link(address)
        await link.tell(code, ext, body)

    async def ask_name_server(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Command:
        """Return the answer of the first name server that answers, starting with the one that answered last.

        Raises:
          NameServerUnreachable: none did.
          BrokerError: it answered with an error, or is no name server.
        """
        failures: list[str] = []
        for address in list(self._name_servers):
            try:
                return await self.ask(address, code, ext, body)
            except BrokerError as error:
                if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED and code in OF_NAME_SERVERS:
                    raise BrokerError(error.code, error.remark + BROKERS_PORT, address) from None
                raise
            except ClientClosed:
                raise
            except ClientError as error:
                failures.append(str(error))
                self._give_up_silent(address, error)
                self._name_servers.remove(address)
                self._name_servers.append(address)
        raise NameServerUnreachable(f"no name server answered: {'; '.join(failures)}")

    async def fetch_route(self, topic: str) -> TopicRoute:
        """Fetch the topic's current route from the name server, keep it, and return it.

        Raises:
          RouteNotFound: the name server has no route for the topic.
          NameServerUnreachable: no name server can be reached.
        """
        ext = {"topic": topic, "acceptStandardJsonOnly": True}
        try:
            answer = await self.ask_name_server(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext)
        except BrokerError as error:
            if error.code == ResponseCode.TOPIC_NOT_EXIST:
                raise RouteNotFound(
                    topic, "has no route at the name server; create it, allow its creation, or let this user use it"
                ) from error
            raise
        route = decode_route(answer.body)
        is_changed = self.routes.get(topic) != route
        self.routes[topic] = route
        if is_changed:
            self.routes_changed()
        return route

    async def route(self, topic: str) -> TopicRoute:
        """Return the topic's route, fetching it only if it is not known yet."""
        return self.routes.get(topic) or await self.fetch_route(topic)

    async def broker_address(self, topic: str, broker_name: str) -> str:
        """Return the address of that broker's master; fetch the route again if it is not known.

        Raises:
          RouteNotFound: the broker has no master in the topic's route.
        """
        address = (await self.route(topic)).master(broker_name)
        if address is None:
            address = (await self.fetch_route(topic)).master(broker_name)
        if address is None:
            raise RouteNotFound(topic, f"has no master at broker {broker_name!r}")
        return address


class NetworkClient(ABC):
    """The base of all clients. ``async with`` opens and closes a client; it does not connect before."""

    def __init__(self, settings: ClientSettings) -> None:
        self.network = Network(settings)
        self._manager: AbstractAsyncContextManager[None] | None = None
        self._closing = trio.Event()
        self._failure: Exception | None = None

    @property
    def client_id(self) -> str:
        """How brokers list this client."""
        return self.network.client_id

    @abstractmethod
    async def _open(self, nursery: trio.Nursery) -> None:
        """Start what the client needs; its tasks go into *nursery*."""

    @abstractmethod
    async def _close(self) -> None:
        """Leave groups and brokers; after ``ClientSettings.close_timeout_s`` the tasks are cancelled."""

    def _fail(self, failure: Exception) -> None:
        """Close the client normally, then raise *failure* out of its ``async with`` block."""
        self._failure = self._failure or failure
        self._closing.set()

    async def __aenter__(self) -> Self:
        _check_trio()
        if self._manager is not None:
            raise ClientClosed("client was opened before; make a new one")
        self._manager = self._opened()
        await self._manager.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._manager is not None
        await self._manager.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[None, None]:
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._run)
                try:
                    yield
                finally:
                    self._closing.set()
        except BaseExceptionGroup as group:
            single = _single(group)
            raise single from single.__cause__

    async def _run(self, task_status: "trio.TaskStatus[None]") -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                self.network.start(nursery)
                await self._open(nursery)
                # From here on cancellation reaches the caller, and leaving its block closes this client.
                scope.shield = True
                task_status.started()
                await self._closing.wait()
                with trio.move_on_after(self.network.settings.close_timeout_s):
                    await self._close()
                self.network.stop()
                scope.cancel()
        if self._failure is not None:
            raise self._failure


def _check_trio() -> None:
    """Raise RuntimeError if trio does not run here."""
    try:
        trio.lowlevel.current_trio_token()
    except RuntimeError:
        text = "this client needs trio, which does not run here; import the same class from "
        raise RuntimeError(f"{text}martlet_client.aio for asyncio, or from .blocking for plain code") from None


def _single(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the one exception in *group*, at any depth; the group itself if it holds several."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return found


def heartbeat_body(client_id: str, producers: list[str], consumers: list[dict[str, object]]) -> bytes:
    """Return the body of a heartbeat."""
    return bodies.dump(
        {
            "clientID": client_id,
            "consumerDataSet": consumers,
            "heartbeatFingerprint": 0,
            "producerDataSet": [{"groupName": group} for group in producers],
            "withoutSub": False,
        }
    )
