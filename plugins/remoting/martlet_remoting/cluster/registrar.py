"""Registers this broker and its topics with name servers.

With the name server in this process it registers by a function call, at once. With remote name servers it registers
over TCP: all topics at first and every 30 seconds, a changed topic at once; at shutdown it unregisters. Each remote
name server has its own task and connection, so that an unreachable one does not delay the others.
"""

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias, final

import orjson
import trio
from msgspec import Struct

from martlet.broker import Broker
from martlet.errors import MartletError, Refused
from martlet.net.addresses import split_address
from martlet.runtime.steps import Steps, finish_now
from martlet.runtime.turns import Turns
from martlet.tables.topics import INHERIT, READ, TEMPLATE_TOPIC, WRITE, Topic
from martlet_remoting.cluster.broker_key import BrokerKey
from martlet_remoting.cluster.nameserver_connection import (
    REQUEST_TIMEOUT_S,
    NameServerConnection,
    NotAdmitted,
    refusal_error,
)
from martlet_remoting.config import RemotingConfig
from martlet_remoting.dialing import why_not_opened
from martlet_remoting.nameserver.kvconfig import ORDER_TOPICS
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codes import ANSWER_LANGUAGE, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.register_broker import Registration, encode_registration, order_topics
from martlet_remoting.wire.routes import MASTER_ID, TopicQueues, TopicShape, Version, decode_route

__all__ = ["Registrar", "create_standard_topics", "standard_topics"]

log = logging.getLogger("martlet.remoting.registration")

GOODBYE_TIMEOUT_S: Final = 2.0
RETRY_FIRST_S: Final = 1.0
RETRY_MOST_S: Final = 10.0
REGISTERED: Final = "registered"
FULL: Final = READ | WRITE | INHERIT
# With more topics most rounds are only a heartbeat, because encoding the whole table takes milliseconds.
FEW_TOPICS: Final = 1000
WHOLE_EVERY: Final = 10
# Pause after each whole registration with the name server in this process, so that deleted topics leave its routes
# together: in units of the registration's duration, and at most in seconds.
PAUSE_TIMES: Final = 10
PAUSE_MOST_S: Final = 1.0

Connect: TypeAlias = Callable[[str, int], Awaitable[trio.abc.Stream]]


@final
class StandardTopic(Struct, frozen=True):
    """A topic that clients and tools expect on every broker."""

    name: str
    queues: int
    perm: int = READ | WRITE


def standard_topics(broker: Broker) -> list[StandardTopic]:
    """Return the topics of a new broker (RocketMQ TopicConfigManager.init), without topics of missing features."""
    config = broker.config
    found = [
        StandardTopic("SELF_TEST_TOPIC", 1),
        StandardTopic("BenchmarkTest", 1024),
        StandardTopic(config.cluster, 16, FULL),
        StandardTopic(config.name, 1, FULL),
        StandardTopic("OFFSET_MOVED_EVENT", 1),
        StandardTopic("SCHEDULE_TOPIC_XXXX", 18),
        StandardTopic("RMQ_SYS_TRACE_TOPIC", 1),
        StandardTopic(f"{config.cluster}_REPLY_TOPIC", 1),
    ]
    if broker.topics.auto_create_enabled:
        found.insert(0, StandardTopic(TEMPLATE_TOPIC, broker.topics.auto_create_queues, FULL))
    return found


def create_standard_topics(broker: Broker) -> None:
    """Create the missing standard topics, except those named after a broker or a cluster with a dot in its name."""
    for topic in standard_topics(broker):
        if "." not in topic.name:
            broker.topics.ensure(topic.name, topic.queues, topic.perm)


def _shape(topic: Topic) -> TopicShape:
    return TopicShape(topic.name, topic.read_queues, topic.write_queues, topic.perm, topic.sys_flag)


@final
class Registrar:
    """Keeps this broker registered. Call `bound` once the port is known; run `run` as long as the broker."""

    def __init__(
        self,
        broker: Broker,
        nameservers: Sequence[str] = (),
        register_s: float = 30.0,
        timeout_ms: int = 120_000,
        connect: Connect = trio.open_tcp_stream,
        key: BrokerKey | None = None,
    ) -> None:
        self._broker = broker
        self.key: Final = BrokerKey(RemotingConfig()) if key is None else key  # signs all requests
        self._register_s = register_s
        self._timeout_ms = timeout_ms
        self._address = ""
        self._inside: NameServer | None = None
        self._inside_stale = False
        self._is_stopped = False
        self._scope: trio.CancelScope | None = None
        self._wake = trio.Event()
        self._remotes = [_Remote(self, address, connect) for address in nameservers]
        broker.topics.changed.append(self._register_change)
        broker.stats.add("registration", self.statistics)

    def bound(self, address: str) -> None:
        """Set the broker's *address* and register it with the name server in this process."""
        host, port = split_address(address)
        advertise = self._broker.config.advertise
        host = advertise or host
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._inside = self._broker.capability(NameServer)
        finish_now(self._register_inside())

    @property
    def address(self) -> str:
        """The address in routes, to which clients connect; empty until `bound`."""
        return self._address

    def nameservers(self) -> list[str]:
        """The addresses of all name servers that this broker registers with."""
        inside = [self._inside.address] if self._inside is not None else []
        return inside + [remote.address for remote in self._remotes]

    def registration(self, *, complete: bool) -> Registration:
        """Return the registration of this broker, without topics."""
        config = self._broker.config
        host, port = split_address(self._address)
        return Registration(
            config.cluster,
            config.name,
            MASTER_ID,
            self._address,
            f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}",
            self._timeout_ms,
            False,
            None,
            self.version(),
            complete=complete,
        )

    def version(self) -> Version:
        """The version of the topic table."""
        held = self._broker.topics.version
        return Version(held.counter, held.state_version, held.timestamp)

    def tells_all(self, rounds: int) -> bool:
        """Return whether round number *rounds* sends all topics, even if none has changed."""
        return len(self._broker.topics) <= FEW_TOPICS or rounds % WHOLE_EVERY == 0

    def encode(self, topics: Iterable[Topic]) -> Steps[tuple[Command, list[bytes]]]:
        """Return the request that registers this broker with *topics*, and its body in pieces.

        Its version is that of the call: with a later one, the name server would take the next change for known.
        """
        return _encode(self.registration(complete=False), topics)

    def question(self) -> Command:
        """Return the request that asks whether this broker's topic version is known; it also counts as a heartbeat."""
        body = orjson.dumps(self.version().as_json())
        return Command(RequestCode.QUERY_DATA_VERSION, self._names(), body, language=ANSWER_LANGUAGE)

    def goodbye(self) -> Command:
        """Return the request that unregisters this broker."""
        return Command(RequestCode.UNREGISTER_BROKER, self._names(), language=ANSWER_LANGUAGE)

    def _names(self) -> dict[str, object]:
        config = self._broker.config
        return {
            "brokerAddr": self._address,
            "brokerId": MASTER_ID,
            "brokerName": config.name,
            "clusterName": config.cluster,
        }

    @property
    def asks_elsewhere(self) -> bool:
        """Whether name servers in other processes are configured."""
        return bool(self._remotes)

    def queues_inside(self, topic: str) -> Sequence[TopicQueues]:
        """Return the queues of *topic* on all brokers that the name server in this process knows."""
        route = self._inside.table.route(topic) if self._inside is not None else None
        return route.queues if route is not None else ()

    async def queues_elsewhere(self, topic: str) -> Sequence[TopicQueues]:
        """Return the queues of *topic* on all brokers, from the first remote name server that answers.

        Raises: OSError, MartletError, trio.BrokenResourceError: no name server gave a valid answer.
        """
        for remote in self._remotes[:-1]:
            try:
                return await remote.queues(topic)
            except (OSError, MartletError, trio.BrokenResourceError) as error:
                log.info("name server %s gave no route for topic[%s]; %s", remote.address, topic, error)
        return await self._remotes[-1].queues(topic)

    def take_orders(self, orders: Iterable[tuple[str, str]]) -> None:
        """Mark the topics that a name server lists as ordered (TopicConfigManager.updateOrderTopicConfig)."""
        topics = self._broker.topics
        for name, _ in orders:
            topic = topics.get(name)
            if topic is not None and not topic.order:
                topics.update(
                    name,
                    topic.read_queues,
                    topic.write_queues,
                    topic.perm,
                    topic.sys_flag,
                    True,
                    topic.attributes,
                    topic.filter_type,
                )

    def retry(self) -> None:
        """Try again now with name servers that refused this broker or could not be reached."""
        for remote in self._remotes:
            remote.retry()

    def has_topic(self, name: str) -> bool:
        return self._broker.topics.get(name) is not None

    def all_topics(self) -> list[Topic]:
        return list(self._broker.topics)

    def _register_change(self, topic: Topic | None) -> None:
        """Register the created or changed *topic*; None means that a topic was deleted."""
        if not self._address or self._is_stopped:
            return
        for remote in self._remotes:
            remote.note(topic)
        if topic is None:
            # The whole table is sent once for any number of topics deleted in this step.
            self._inside_stale = True
            self._wake.set()
        elif self._inside is not None:
            finish_now(self._tell_inside(self._inside, (_shape(topic),), complete=False))

    def _register_inside(self) -> Steps[None]:
        if self._inside is None:
            return
        self._inside_stale = False
        yield from self._tell_inside(self._inside, self._shapes(), complete=True)
        self.take_orders((self._inside.kv.namespace(ORDER_TOPICS) or {}).items())

    def _shapes(self) -> Iterator[TopicShape]:
        """Yield all topics, each in its current state, because topics may change between slices."""
        topics = self._broker.topics
        for topic in topics:
            current_topic = topics.get(topic.name)
            if current_topic is not None:
                yield _shape(current_topic)

    def _tell_inside(self, server: NameServer, shapes: Iterable[TopicShape], *, complete: bool) -> Steps[None]:
        """Register with the name server in this process; log a refusal instead of failing the caller."""
        registration = self.registration(complete=complete)
        try:
            yield from server.table.register(registration, server.now(), None, shapes, limited=False)
        except Refused as error:
            log.warning("the name server in this process refused the registration; %s", error)

    async def run(self) -> None:
        """Register and stay registered until `stop` or cancelled; then unregister, for a short time at most."""
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            if self._is_stopped:
                self._scope.cancel()
            for remote in self._remotes:
                nursery.start_soon(remote.run)
            try:
                await self._keep_inside()
            finally:
                self._leave_inside()

    def stop(self) -> None:
        """Unregister now, so that clients go elsewhere while the broker shuts down; `run` ends."""
        self._is_stopped = True
        self._leave_inside()
        if self._scope is not None:
            self._scope.cancel()

    async def _keep_inside(self) -> None:
        for rounds in itertools.count(1):
            with trio.move_on_after(self._register_s):
                await self._wake.wait()
            self._wake = trio.Event()
            if self._inside_stale or self.tells_all(rounds) or not self._renew_inside():
                start = trio.current_time()
                await self.turns.finish(self._register_inside())
                await trio.sleep(min(PAUSE_TIMES * (trio.current_time() - start), PAUSE_MOST_S))

    def _renew_inside(self) -> bool:
        """Send a heartbeat; return False if the name server does not have the current topics."""
        if self._inside is None:
            return True
        table, cluster = self._inside.table, self._broker.config.cluster
        if table.version_of(cluster, self._address) != self.version():
            return False
        table.live.heard(cluster, self._address, self._inside.now())
        return True

    def _leave_inside(self) -> None:
        if self._inside is not None:
            config = self._broker.config
            self._inside.table.unregister(config.cluster, config.name, self._address)

    @property
    def turns(self) -> Turns:
        """Runs long work in slices."""
        return self._broker.turns

    @property
    def register_s(self) -> float:
        return self._register_s

    def statistics(self) -> dict[str, object]:
        states: dict[str, str] = {remote.address: remote.state for remote in self._remotes}
        if self._inside is not None:
            states[self._inside.address] = "unregistered" if self._is_stopped else REGISTERED
        return {"address": self._address, "nameservers": states}


def _encode(registration: Registration, topics: Iterable[Topic]) -> Steps[tuple[Command, list[bytes]]]:
    table = ((topic.name, topic.as_json()) for topic in topics)
    ext, body = yield from encode_registration(registration, table)
    return Command(RequestCode.REGISTER_BROKER, ext, language=ANSWER_LANGUAGE), body


@final
class _Remote:
    """One remote name server."""

    def __init__(self, registrar: Registrar, address: str, connect: Connect) -> None:
        self.address = address
        self.state = "not yet registered"
        self._registrar = registrar
        self._host, self._port = split_address(address)
        self._connect = connect
        self._changed_topics: dict[str, Topic] = {}
        self._nap: trio.CancelScope | None = None
        self._pause: trio.CancelScope | None = None
        self._pause_s = RETRY_FIRST_S
        self._has_warned_of_routes = False

    def note(self, topic: Topic | None) -> None:
        """Send *topic* soon; a deletion (None) cannot be sent, so the whole table is sent without the topic."""
        if topic is not None:
            self._changed_topics[topic.name] = topic
            if self._nap is not None:
                self._nap.cancel()

    async def queues(self, topic: str) -> Sequence[TopicQueues]:
        """Return the queues of *topic*, over a separate connection, because that of the registration may be busy."""
        stream = await self._connect(self._host, self._port)
        try:
            ext = {"topic": topic, "acceptStandardJsonOnly": True}
            question = Command(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext, language=ANSWER_LANGUAGE)
            answer = await self._open(stream).exchange(question)
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            self._warn_of_hidden_route(topic)
            return ()
        if answer.code != ResponseCode.SUCCESS:
            raise refusal_error(question, answer, self._registrar.key)
        return decode_route(answer.body).queues

    def _open(self, stream: trio.abc.Stream) -> NameServerConnection:
        return NameServerConnection(stream, self._registrar.key, self._registrar.turns)

    def _warn_of_hidden_route(self, topic: str) -> None:
        """Warn once that this broker may not see the routes of its own topics: it would hand out only its queues."""
        registrar = self._registrar
        if registrar.key.signing_key is not None and self.state == REGISTERED and registrar.has_topic(topic):
            if not self._has_warned_of_routes:
                text = "name server %s gives no route for topic[%s], which this broker has registered; "
                text += "let the user of remoting.nameservers_key get all topics there"
                log.warning(text, self.address, topic)
            self._has_warned_of_routes = True

    async def run(self) -> None:
        """Connect, stay registered, and reconnect after failures, until cancelled."""
        while True:
            try:
                await self._stay_registered()
            except (OSError, MartletError, trio.BrokenResourceError, trio.TooSlowError) as error:
                self._note_failure(why_not_opened(error))
            with self._pausing():
                await trio.sleep_forever()

    def _note_failure(self, reason: str) -> None:
        self.state = f"failed: {reason}"
        log.warning("name server %s: registration failed, retrying in %g s; %s", self.address, self._pause_s, reason)

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Cancel the block after a pause, which is longer each time, or when `retry` is called."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, RETRY_MOST_S)
        try:
            with trio.move_on_after(pause_s) as self._pause:
                yield
        finally:
            self._pause = None

    def retry(self) -> None:
        """End a pause after a failure."""
        self._pause_s = RETRY_FIRST_S
        if self._pause is not None:
            self._pause.cancel()

    async def _stay_registered(self) -> None:
        with trio.fail_after(REQUEST_TIMEOUT_S):
            stream = await self._connect(self._host, self._port)
        connection = self._open(stream)
        try:
            while True:
                try:
                    await self._keep_registered(connection)
                except NotAdmitted as error:
                    # Perhaps only until both have the new secret. The name server keeps the routes as long as the
                    # connection is open and the registration has not expired.
                    self._note_failure(str(error))
                with self._pausing():
                    await connection.listen()
        finally:
            with trio.move_on_after(GOODBYE_TIMEOUT_S, shield=True):
                await self._leave(connection)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    async def _keep_registered(self, connection: NameServerConnection) -> None:
        """Register, and again after each change and from time to time, until a request is refused."""
        await self._register(connection, self._registrar.all_topics())
        log.info("registered with name server %s as %s", self.address, self._registrar.address)
        for rounds in itertools.count(1):
            await self._wait_for_change(connection)
            if self._changed_topics:
                await self._register(connection, list(self._changed_topics.values()))
            elif self._registrar.tells_all(rounds) or await self._is_unknown(connection):
                await self._register(connection, self._registrar.all_topics())

    async def _register(self, connection: NameServerConnection, topics: list[Topic]) -> None:
        self._changed_topics.clear()
        self.state = "registering"
        answer = await connection.ask(*await self._registrar.turns.finish(self._registrar.encode(topics)))
        self.state = REGISTERED
        self._pause_s = RETRY_FIRST_S
        if answer.remark:
            log.warning("name server %s accepted the registration, but %s", self.address, answer.remark)
        self._registrar.take_orders(order_topics(answer.body))

    async def _is_unknown(self, connection: NameServerConnection) -> bool:
        """Return whether the name server lacks the current topics."""
        answer = await connection.ask(self._registrar.question())
        return answer.text("changed", "true") != "false"

    async def _wait_for_change(self, connection: NameServerConnection) -> None:
        """Wait until it is time to register again or a topic has changed."""
        with trio.CancelScope() as self._nap:
            if not self._changed_topics:
                with trio.move_on_after(self._registrar.register_s):
                    await connection.listen()
        self._nap = None

    async def _leave(self, connection: NameServerConnection) -> None:
        if self.state == REGISTERED and not connection.is_broken:
            try:
                await connection.ask(self._registrar.goodbye())
            except (OSError, MartletError, trio.BrokenResourceError, trio.TooSlowError) as error:
                log.info("cannot unregister from name server %s; %s", self.address, error)
