"""The name servers and brokers of a cluster: its topics, the topics' brokers and queues, and the queues' offsets."""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias, TypeVar, final

import orjson

from martlet.errors import RemoteProtocolError
from martlet_remoting.wire.answers.bodies import integer, load_object, mapping, queue_map, texts
from martlet_remoting.wire.codes import RESPONSE_NAMES, RequestCode, ResponseCode
from martlet_remoting.wire.packets import MessageQueue
from martlet_remoting.wire.routes import TopicRoute, decode_route
from martlet_spark.connection import CONNECTIONS, AnswerFrame, BrokerConnection, ConnectionBroken, Security, attempts
from martlet_spark.errors import ReadError

__all__ = [
    "BUSY",
    "DEAD_LETTERS",
    "Bounds",
    "BrokerGone",
    "Busy",
    "Cluster",
    "UnknownBroker",
    "UnknownTopic",
    "check",
    "rights_hint",
]

T = TypeVar("T")
# Timeout for an answer of one name server, if there are several.
SILENCE_S: Final = 5.0
# The first offset of a queue and the one after its last message.
Bounds: TypeAlias = tuple[int, int]

# Answers of servers that are overloaded, starting or stopping.
BUSY: Final = frozenset((ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.GO_AWAY))
# Brokers' own topics, which a pattern does not select.
INTERNAL: Final = re.compile(
    r"%RETRY%|%DLQ%|rmq_sys_|RMQ_SYS_|TBW102$|SCHEDULE_TOPIC_XXXX$|BenchmarkTest$|SELF_TEST_TOPIC$"
    r"|OFFSET_MOVED_EVENT$|TRANS_CHECK_MAX_TIME_TOPIC$|CHECKPOINT_TOPIC$|.*_REPLY_TOPIC$"
)
NAME_SERVER: Final = "name server"
DEAD_LETTERS: Final = "%DLQ%"
RIGHTS: Final = "check the options accessKey and secretKey, and what the brokers allow this user"
# Texts of refusals that do not depend on the user: closed topics, brokers and groups, and plugins that are off.
CLOSED: Final = re.compile(r"\bperm\b|forbidden|not writable|not readable|consumeEnable|plugins\.enabled")
# The field of a route that only static topics have.
STATIC: Final = b"topicQueueMappingByBroker"


class UnknownTopic(ReadError):
    """No name server, or no broker, knows the topic."""


class UnknownBroker(ConnectionBroken):
    """The route of a topic lacks the broker: the broker has left, or the broker or the name server is starting."""


class Busy(ConnectionBroken):
    """The server has no room for the request at the moment; another connection may be served."""


class BrokerGone(ReadError):
    """A broker left, or its topic was deleted, and did not come back in time."""


def check(answer: AnswerFrame, what: str, where: str) -> None:
    """Raise `ReadError` unless *answer* says success; the text names the request *what* and the server *where*.

    Raises:
      UnknownTopic: the server does not know the topic.
      Busy: the server may answer later.
    """
    if answer.code == ResponseCode.SUCCESS:
        return
    name = RESPONSE_NAMES.get(answer.code, str(answer.code))
    if answer.code in BUSY:
        raise Busy(f"{where} refused the {what}: {name}: {answer.remark}")
    kind = UnknownTopic if answer.code == ResponseCode.TOPIC_NOT_EXIST else ReadError
    hint = rights_hint(answer)
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED and where.startswith(NAME_SERVER):
        hint = (
            "; this is the port of a broker: give that of a name server in the option endpoints, which is usually 9876"
        )
    raise kind(f"{where} refused the {what}: {name}: {answer.remark}{hint}")


def rights_hint(answer: AnswerFrame) -> str:
    """Return a hint about the user's rights if *answer* refuses for lack of them, else ""."""
    if answer.code != ResponseCode.NO_PERMISSION or CLOSED.search(answer.remark):
        return ""
    return f"; {RIGHTS}"


@final
class Cluster:
    """A cluster behind the name servers *endpoints*, each ``host:port``.

    Retries a server that does not answer for *timeout_s*, unless another one answers.
    """

    def __init__(self, endpoints: Sequence[str], security: Security, timeout_s: float) -> None:
        self.endpoints = frozenset(endpoints)
        self._endpoints = tuple(endpoints)
        self.security = security
        self.timeout_s = timeout_s

    def topics(self, pattern: str) -> list[str]:
        """Return the names of the topics that match the regular expression *pattern*, without brokers' own topics."""
        matches = re.compile(pattern).fullmatch
        return sorted(name for name in self._topics() if matches(name) and not INTERNAL.match(name))

    def knows_no_topic(self) -> bool:
        """Whether the name servers know no topic, not even brokers' own: name servers or brokers have just started.

        False if no name server answers.
        """
        try:
            return not self._topics()
        except ReadError:
            return False

    def _topics(self) -> Sequence[str]:
        where, [answer] = self._ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, [{}], "list of topics")
        check(answer, "list of topics", f"{NAME_SERVER} {where}")
        return texts(load_object(bytes(answer.body)), "topicList")

    def route(self, topic: str) -> TopicRoute:
        """Return the brokers and queues of *topic*.

        Raises:
          UnknownTopic: there is no such topic.
          ReadError: no name server answers, or the topic is static.
        """
        found = self.routes([topic])
        if topic not in found:
            servers = ", ".join(self._endpoints)
            if self.security.signing_key is not None:
                # A name server that knows users answers so, too.
                text = f"topic {topic!r} is unknown to name server {servers}, or this user may not read it"
                raise UnknownTopic(f"{text}; create it, send to it first, or {RIGHTS}")
            if topic.startswith(DEAD_LETTERS):
                text = f"group {topic.removeprefix(DEAD_LETTERS)!r} has no dead letters, or does not exist"
                raise UnknownTopic(f"{text}: topic {topic!r} is unknown to name server {servers}")
            raise UnknownTopic(f"topic {topic!r} is unknown to name server {servers}; create it, or send to it first")
        return found[topic]

    def routes(self, topics: Sequence[str]) -> dict[str, TopicRoute]:
        """Return the brokers and queues of each of *topics* that exists; asks for all topics at once.

        Raises:
          ReadError: no name server answers, or a topic is static.
        """
        if not topics:
            return {}
        what = f"route of topic {topics[0]!r}"
        where, answers = self._ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, [{"topic": topic} for topic in topics], what)
        found: dict[str, TopicRoute] = {}
        for topic, answer in zip(topics, answers, strict=True):
            if answer.code != ResponseCode.TOPIC_NOT_EXIST:
                check(answer, f"route of topic {topic!r}", f"{NAME_SERVER} {where}")
                found[topic] = _route(topic, bytes(answer.body))
        return found

    def masters(self) -> dict[str, str]:
        """Return the addresses of all brokers by name.

        Raises:
          ReadError: no name server answers, or it refuses.
        """
        where, (answer,) = self._ask(RequestCode.GET_BROKER_CLUSTER_INFO, [{}], "list of brokers")
        check(answer, "list of brokers", f"{NAME_SERVER} {where}")
        found: dict[str, str] = {}
        for name, data in mapping(load_object(bytes(answer.body)), "brokerAddrTable").items():
            addresses = mapping(data, "brokerAddrs") if isinstance(data, Mapping) else {}
            masters = [str(address) for number, address in addresses.items() if str(number) == "0"]
            found.update({str(name): address for address in masters})
        return found

    def bounds(self, routes: Mapping[str, TopicRoute]) -> dict[str, dict[MessageQueue, Bounds]]:
        """Return the bounds of all readable queues of each topic; asks each broker once for all topics.

        Leaves out a topic that a broker of its route does not have: the topic is being deleted.

        Raises:
          ReadError: a broker refuses, or does not answer in time.
        """
        found = {topic: dict.fromkeys(route.read_queues(topic), (0, 0)) for topic, route in routes.items()}
        by_broker: dict[str, list[str]] = {}
        for topic, queues in found.items():
            for broker in {queue.broker_name for queue in queues}:
                by_broker.setdefault(broker, []).append(topic)
        for broker, topics in sorted(by_broker.items()):
            answers = self.ask_broker(topics[0], routes[topics[0]], broker, partial(_statistics, topics, broker))
            for topic, (answer, table) in zip(topics, answers, strict=True):
                if answer.code == ResponseCode.TOPIC_NOT_EXIST:
                    found.pop(topic, None)
                elif topic in found:
                    check(answer, f"offsets of topic {topic!r}", f"broker {broker!r}")
                    _add_bounds(found[topic], table, routes[topic].write_queues(topic))
        return found

    def offsets_at(self, times_ms: Mapping[MessageQueue, int], route: TopicRoute) -> dict[MessageQueue, int]:
        """Return, for each queue, the offset of the first message that was stored at the given time or later."""
        found: dict[MessageQueue, int] = {}
        for broker in sorted({queue.broker_name for queue in times_ms}):
            own = {queue: time_ms for queue, time_ms in times_ms.items() if queue.broker_name == broker}
            answers = self.ask_broker(next(iter(own)).topic, route, broker, partial(_search, own))
            for queue, answer in zip(own, answers, strict=True):
                check(answer, f"search by time in queue {queue.queue_id} of {queue.topic!r}", f"broker {broker!r}")
                found[queue] = answer.integer("offset")
        return found

    def commit(self, group: str, offsets: Mapping[MessageQueue, int], routes: Mapping[str, TopicRoute]) -> None:
        """Set the committed offsets of consumer *group*, which is created if the brokers allow it.

        Raises:
          ReadError: a broker refuses, or does not answer.
        """
        for broker in sorted({queue.broker_name for queue in offsets}):
            own = {queue: offset for queue, offset in offsets.items() if queue.broker_name == broker}
            topic = next((queue.topic for queue in own if queue.topic in routes), None)
            if topic is None:
                continue
            ask = partial(self.ask_broker, topic, routes[topic], broker)
            answers = ask(partial(_commit, group, own))
            if any(answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST for answer in answers):
                ask(partial(_create, group))
                answers = ask(partial(_commit, group, own))
            for answer in answers:
                check(answer, f"commit of group {group!r}", f"broker {broker!r}")

    @staticmethod
    def address(route: TopicRoute, broker: str) -> str:
        """Return the address of the master of *broker*; a slave may lack the last messages.

        Raises:
          UnknownBroker: the broker has no master at the moment.
        """
        if route.address(broker) is None:
            raise UnknownBroker(f"broker {broker!r} is not registered with the name servers")
        address = route.master(broker)
        if address is None:
            raise UnknownBroker(f"broker {broker!r} has no master at the moment, only slaves")
        return address

    def ask_broker(self, topic: str, route: TopicRoute, broker: str, ask: Callable[[BrokerConnection], T]) -> T:
        """Call *ask* with a connection to *broker*, which has queues of *topic*, and return its result.

        If the broker does not answer, asks the name servers for its address again.

        Raises:
          BrokerGone: the name servers did not know the broker in time.
          ReadError: the broker did not answer in time.
        """
        lost: ConnectionBroken | UnknownTopic | None = None
        for number in attempts(self.timeout_s):
            try:
                return self._once(self.address(self.route(topic) if number else route, broker), ask)
            except (ConnectionBroken, UnknownTopic) as error:
                lost = error
            except RemoteProtocolError as error:
                raise ReadError(f"broker {broker!r} does not speak RocketMQ's protocol: {error}") from error
        kind = ReadError if type(lost) is ConnectionBroken else BrokerGone
        raise kind(f"broker {broker!r} cannot be reached: {lost}; start it, then the query again") from lost

    def _ask(self, code: int, ext: Sequence[Mapping[str, object]], what: str) -> tuple[str, list[AnswerFrame]]:
        """Ask the name servers in turn until the timeout; return the one that answered, and its answers.

        Begins with the server that answered last. If there are several, a silent one gets only a part of the time.
        """
        lost: ConnectionBroken | RemoteProtocolError | None = None
        wait_s = self.timeout_s if len(self._endpoints) == 1 else min(self.timeout_s, SILENCE_S)
        for _ in attempts(self.timeout_s):
            others = 0
            for address in self._endpoints:
                try:
                    answers = self._once(address, lambda connection: connection.request_all(code, ext), wait_s)
                except (ConnectionBroken, RemoteProtocolError) as error:
                    lost = error
                    others += isinstance(error, RemoteProtocolError)
                else:
                    self._endpoints = (address, *(each for each in self._endpoints if each != address))
                    return address, answers
            if others == len(self._endpoints):  # all are servers of another kind, and will stay so
                break
        servers = ", ".join(self._endpoints)
        text = f"no name server of {servers} answered the request for the {what}: {lost}"
        raise ReadError(f"{text}; check the option endpoints, and that a name server runs there") from lost

    def _once(self, address: str, ask: Callable[[BrokerConnection], T], wait_s: float | None = None) -> T:
        with CONNECTIONS.lent(address, self.security, self.timeout_s if wait_s is None else wait_s) as connection:
            return ask(connection)


def _statistics(
    topics: Sequence[str], broker: str, connection: BrokerConnection
) -> list[tuple[AnswerFrame, dict[MessageQueue, object]]]:
    """Return the statistics of *broker* for its queues of each of *topics*.

    Raises:
      UnknownBroker: its address now belongs to another broker, which has other messages in queues of the same numbers.
    """
    found: list[tuple[AnswerFrame, dict[MessageQueue, object]]] = []
    answers = connection.request_all(RequestCode.GET_TOPIC_STATS_INFO, [{"topic": topic} for topic in topics])
    for answer in answers:
        if answer.code != ResponseCode.SUCCESS:
            found.append((answer, {}))
            continue
        table = queue_map(load_object(bytes(answer.body)).get("offsetTable"))
        names = {queue.broker_name for queue in table}
        if names and broker not in names:
            raise UnknownBroker(f"at {connection.address}, which the name servers say, is broker {min(names)!r}")
        found.append((answer, table))
    return found


def _add_bounds(
    found: dict[MessageQueue, Bounds], table: Mapping[MessageQueue, object], writable: Collection[MessageQueue]
) -> None:
    """Set the bounds in *found* for the queues that *table* has.

    Adds queues that the topic has lost while they had messages: Martlet still allows reads of them. A queue that is
    *writable* and not in *found* is on a RocketMQ broker, which allows no reads of it.
    """
    for queue, item in table.items():
        if isinstance(item, Mapping):
            end = max(integer(item, "maxOffset"), 0)
            if queue in found or (end and queue not in writable):
                found[queue] = (max(integer(item, "minOffset"), 0), end)


def _route(topic: str, body: bytes) -> TopicRoute:
    """Decode the route of *topic*, which must not be static."""
    if STATIC in body and load_object(body).get(STATIC.decode()):
        text = f"topic {topic!r} is a static topic of RocketMQ: its queues move between brokers"
        raise ReadError(f"{text}, which the connector does not support; use a topic that is not static")
    return decode_route(body)


def _search(times_ms: Mapping[MessageQueue, int], connection: BrokerConnection) -> list[AnswerFrame]:
    """Search queues by time; return the answers in the order of the queues."""
    ext = [{"topic": queue.topic, "queueId": queue.queue_id, "timestamp": ms} for queue, ms in times_ms.items()]
    return connection.request_all(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, ext)


def _commit(group: str, offsets: Mapping[MessageQueue, int], connection: BrokerConnection) -> list[AnswerFrame]:
    ext = [
        {"consumerGroup": group, "topic": queue.topic, "queueId": queue.queue_id, "commitOffset": offset}
        for queue, offset in offsets.items()
    ]
    return connection.request_all(RequestCode.UPDATE_CONSUMER_OFFSET, ext)


def _create(group: str, connection: BrokerConnection) -> AnswerFrame:
    """Let the broker create *group*: a consumer of the group sends a heartbeat, and leaves."""
    client = f"martlet-spark@{os.getpid()}"
    consumer = {
        "groupName": group,
        "consumeType": "CONSUME_ACTIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "subscriptionDataSet": [],
        "unitMode": False,
    }
    body = orjson.dumps({"clientID": client, "consumerDataSet": [consumer], "producerDataSet": []})
    answer = connection.request(RequestCode.HEART_BEAT, {}, body)
    check(answer, f"creation of group {group!r}", connection.address)
    return connection.request(RequestCode.UNREGISTER_CLIENT, {"clientID": client, "consumerGroup": group})
