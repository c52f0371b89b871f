"""Administration: topics, groups, offsets, brokers, and finding messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

import trio
from msgspec import Struct

from martlet_client.arguments import I32_MAX, check_integer, check_queue, check_text_mapping, check_time_ms, check_type
from martlet_client.messages import check_group, check_topic
from martlet_client.network import TEMPLATE_TOPIC, ClientSettings, NetworkClient, split_address
from martlet_client.offsets import BrokerOffsets, max_offset, search_offset
from martlet_client.producer import QUEUES_MAX
from martlet_client.pulling import decode_messages
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import (
    BadAnswer,
    BrokerError,
    ClientError,
    ConnectionLost,
    MessageNotFound,
    RequestTimeout,
    RouteNotFound,
)
from martlet_remoting.wire.answers.messages import RETRY_PREFIX, DamagedMessage, ReceivedMessage, parse_message_id
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import MessageQueue
from martlet_remoting.wire.routes import MASTER_ID, TopicRoute

__all__ = ["Admin", "ClusterInfo", "ConnectedMember", "QueueLag", "QueueStats"]

PERM_READ_WRITE: Final = 6
DELETE_TIMEOUT_S: Final = 10.0
KEY_RESULTS_MAX: Final = 64


@final
class ClusterInfo(Struct, frozen=True):
    """The brokers that the name server knows.

    ``clusters`` has the broker names of each cluster, ``brokers`` the addresses of each broker name by broker id;
    id 0 is the master.
    """

    clusters: Mapping[str, tuple[str, ...]]
    brokers: Mapping[str, Mapping[int, str]]

    def masters(self, cluster: str | None = None) -> dict[str, str]:
        """Return the master's address for each broker name of *cluster*, or of all clusters."""
        names = self.brokers.keys() if cluster is None else self.clusters.get(cluster, ())
        found = {name: self.brokers.get(name, {}).get(MASTER_ID) for name in sorted(names)}
        return {name: address for name, address in found.items() if address is not None}


@final
class QueueStats(Struct, frozen=True):
    """The offsets of a queue: from ``min_offset`` to below ``max_offset``.

    ``last_update_ms`` is when its newest message was stored, 0 if it has none.
    """

    queue: MessageQueue
    min_offset: int
    max_offset: int
    last_update_ms: int


@final
class QueueLag(Struct, frozen=True):
    """The lag of a group in a queue.

    ``broker_offset`` is the end of the queue, ``consumer_offset`` the group's committed offset, and
    ``last_consumed_ms`` the store time of the last message that it consumed.
    """

    queue: MessageQueue
    broker_offset: int
    consumer_offset: int
    last_consumed_ms: int

    @property
    def lag(self) -> int:
        """How many messages the group still has to consume."""
        return self.broker_offset - self.consumer_offset


@final
class ConnectedMember(Struct, frozen=True):
    """A connected member of a consumer group, as a broker lists it."""

    client_id: str
    address: str
    language: str
    version: int


@final
class Admin(NetworkClient):
    """Inspects and changes topics, groups, offsets and brokers, and finds messages.

    Example:
        async with Admin("127.0.0.1:9876") as admin:
            await admin.create_topic("Greetings", queues=8)

    Every method raises `BrokerError` when a broker refuses, `NameServerUnreachable`, `ConnectionLost` or
    `RequestTimeout` when one cannot be reached, `TypeError`, `ValueError` or `MessageRefused` for a wrong argument,
    and `RouteNotFound` for a topic that does not exist.

    Args:
      name_server: ``host:port``, several separated by ``;``, or `ClientSettings`.
    """

    def __init__(self, name_server: str | ClientSettings) -> None:
        super().__init__(ClientSettings.of(name_server))

    async def _open(self, nursery: trio.Nursery) -> None:
        """Connections are opened by the first call."""

    async def _close(self) -> None:
        """Nothing was registered."""

    # Clusters and brokers

    async def cluster(self) -> ClusterInfo:
        """Return all brokers by cluster."""
        answer = await self.network.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, {})
        fields = bodies.load_object(answer.body)
        clusters = bodies.mapping(fields, "clusterAddrTable")
        brokers: dict[str, dict[int, str]] = {}
        for name, data in bodies.mapping(fields, "brokerAddrTable").items():
            addresses = bodies.mapping(data, "brokerAddrs") if isinstance(data, dict) else {}
            brokers[str(name)] = {int(str(key)): str(address) for key, address in addresses.items()}
        names = {str(name): tuple(sorted(bodies.texts(clusters, str(name)))) for name in clusters}
        return ClusterInfo(names, brokers)

    async def broker_config(self, address: str) -> dict[str, str]:
        """Return every setting of the broker at *address*, which is ``host:port``."""
        _check_address(address)
        answer = await self.network.ask(address, RequestCode.GET_BROKER_CONFIG, {})
        return decode_settings(answer.body)

    async def update_broker_config(self, address: str, settings: Mapping[str, str]) -> None:
        """Change settings of the broker at *address*; a broker ignores settings that it does not know."""
        _check_address(address)
        _check_settings(settings)
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        await self.network.ask(address, RequestCode.UPDATE_BROKER_CONFIG, {}, text.encode())

    async def broker_runtime(self, address: str) -> dict[str, str]:
        """Return the counters of the broker at *address*, by name."""
        _check_address(address)
        answer = await self.network.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {})
        table = bodies.mapping(bodies.load_object(answer.body), "table")
        return {str(name): str(value) for name, value in table.items()}

    # Topics

    async def topics(self) -> list[str]:
        """Return the names of all topics, including system topics."""
        answer = await self.network.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {})
        return sorted(bodies.texts(bodies.load_object(answer.body), "topicList"))

    async def topic_route(self, topic: str) -> TopicRoute:
        """Return the brokers and queues of *topic*."""
        check_topic(topic)
        return await self._route(topic)

    async def create_topic(
        self,
        topic: str,
        *,
        queues: int = 8,
        perm: int = PERM_READ_WRITE,
        cluster: str | None = None,
        attributes: str = "",
    ) -> list[str]:
        """Create or change *topic* on every broker, or on those of *cluster*; return the brokers' names.

        *perm* is 4 (read), 2 (write) or 6 (both). *attributes* are RocketMQ's, such as ``+message.type=DELAY``,
        separated by commas.
        """
        check_topic(topic)
        check_integer("queues", queues, 1, QUEUES_MAX)
        check_integer("perm", perm, 0, 7)
        _check_cluster(cluster)
        check_type("attributes", attributes, str, "for example '+message.type=DELAY'")
        ext = {
            "topic": topic,
            "defaultTopic": TEMPLATE_TOPIC,
            "readQueueNums": queues,
            "writeQueueNums": queues,
            "perm": perm,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": False,
            "attributes": attributes,
        }
        masters = await self._masters(cluster)
        for address in masters.values():
            await self.network.ask(address, RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
        return list(masters)

    async def delete_topic(self, topic: str) -> None:
        """Delete *topic* on every broker and name server; retention removes its messages from the log."""
        check_topic(topic)
        ext = {"topic": topic}
        for address in (await self._masters()).values():
            await self.network.ask(address, RequestCode.DELETE_TOPIC_IN_BROKER, ext, b"", DELETE_TIMEOUT_S)
        for address in self.network.settings.name_servers():
            await self.network.ask(address, RequestCode.DELETE_TOPIC_IN_NAMESRV, ext)
        self.network.routes.pop(topic, None)

    async def topic_stats(self, topic: str) -> list[QueueStats]:
        """Return the statistics of each queue of *topic*, sorted by queue."""
        check_topic(topic)
        found: list[QueueStats] = []
        for address in await self._topic_masters(topic):
            answer = await self.network.ask(address, RequestCode.GET_TOPIC_STATS_INFO, {"topic": topic})
            for queue, item in _queue_items(answer.body):
                found.append(
                    QueueStats(
                        queue,
                        bodies.integer(item, "minOffset"),
                        bodies.integer(item, "maxOffset"),
                        bodies.integer(item, "lastUpdateTimestamp", 0),
                    )
                )
        return sorted(found, key=lambda stats: stats.queue)

    # Groups

    async def groups(self) -> list[str]:
        """Return the names of all consumer groups that are configured on any broker."""
        found: set[str] = set()
        for address in (await self._masters()).values():
            answer = await self.network.ask(address, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {})
            table = bodies.mapping(bodies.load_object(answer.body), "subscriptionGroupTable")
            found.update(map(str, table))
        return sorted(found)

    async def create_group(
        self, group: str, *, consume_enable: bool = True, retry_max_times: int = 16, cluster: str | None = None
    ) -> None:
        """Create or change *group* on every broker, or on those of *cluster*.

        Without *consume_enable* brokers refuse its pulls. A message that failed *retry_max_times* times becomes
        a dead letter.
        """
        check_group(group)
        check_type("consume_enable", consume_enable, bool)
        check_integer("retry_max_times", retry_max_times, -1, I32_MAX)
        _check_cluster(cluster)
        fields: dict[str, object] = {
            "brokerId": MASTER_ID,
            "consumeBroadcastEnable": True,
            "consumeEnable": consume_enable,
            "consumeFromMinEnable": True,
            "groupName": group,
            "notifyConsumerIdsChangedEnable": True,
            "retryMaxTimes": retry_max_times,
            "retryQueueNums": 1,
            "whichBrokerWhenConsumeSlowly": 1,
        }
        body = bodies.dump(fields)
        for address in (await self._masters(cluster)).values():
            await self.network.ask(address, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)

    async def delete_group(self, group: str, *, offsets_too: bool = False) -> None:
        """Delete *group* on every broker; with *offsets_too* also the offsets that it committed."""
        check_group(group)
        check_type("offsets_too", offsets_too, bool)
        ext = {"groupName": group, "cleanOffset": offsets_too}
        for address in (await self._masters()).values():
            await self.network.ask(address, RequestCode.DELETE_SUBSCRIPTIONGROUP, ext)

    async def group_members(self, group: str) -> list[ConnectedMember]:
        """Return the connected members of *group*; empty when none is."""
        check_group(group)
        found: set[ConnectedMember] = set()
        for address in (await self._masters()).values():
            try:
                answer = await self.network.ask(
                    address, RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group}
                )
            except BrokerError as error:
                if error.code in (ResponseCode.CONSUMER_NOT_ONLINE, ResponseCode.SYSTEM_ERROR):
                    continue
                raise
            found.update(map(_member, bodies.objects(bodies.load_object(answer.body), "connectionSet")))
        return sorted(found, key=lambda member: member.client_id)

    async def group_lag(self, group: str, topic: str = "") -> list[QueueLag]:
        """Return the lag of *group* in each queue of *topic*, or of every topic it consumes, sorted by queue."""
        check_group(group)
        check_type("topic", topic, str)
        if topic:
            check_topic(topic)
        found: list[QueueLag] = []
        ext = {"consumerGroup": group, **({"topic": topic} if topic else {})}
        addresses = await self._topic_masters(topic) if topic else list((await self._masters()).values())
        for address in addresses:
            answer = await self.network.ask(address, RequestCode.GET_CONSUME_STATS, ext)
            for queue, item in _queue_items(answer.body):
                found.append(
                    QueueLag(
                        queue,
                        bodies.integer(item, "brokerOffset"),
                        bodies.integer(item, "consumerOffset"),
                        bodies.integer(item, "lastTimestamp", 0),
                    )
                )
        return sorted(found, key=lambda lag: lag.queue)

    async def reset_offsets(self, group: str, topic: str, timestamp_ms: int = -1) -> dict[MessageQueue, int]:
        """Reset *group* to the first messages stored at *timestamp_ms* or later; return the new offsets.

        -1 means the end: the group skips everything stored so far. Connected members follow within seconds.
        """
        check_group(group)
        check_topic(topic)
        check_time_ms("timestamp_ms", timestamp_ms, -1)
        ext = {"topic": topic, "group": group, "timestamp": timestamp_ms, "isForce": True}
        try:
            return await self._reset(await self._topic_masters(topic), ext)
        except BrokerError as error:
            if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
                raise
        return await self._commit_reset(group, topic, timestamp_ms)

    async def _commit_reset(self, group: str, topic: str, timestamp_ms: int) -> dict[MessageQueue, int]:
        """Commit the new offsets of an offline group from here: RocketMQ before 5 leaves that to its tools."""
        offsets = BrokerOffsets(self.network, group)
        found: dict[MessageQueue, int] = {}
        for queue in (await self.network.route(topic)).read_queues(topic):
            if timestamp_ms < 0:
                found[queue] = await max_offset(self.network, queue)
            else:
                found[queue] = await search_offset(self.network, queue, timestamp_ms)
            await offsets.write(queue, found[queue])
        return found

    async def reset_queue_offset(self, group: str, queue: MessageQueue, offset: int) -> dict[MessageQueue, int]:
        """Reset *group* to *offset* of *queue*; return the new offset of each queue that changed."""
        check_group(group)
        check_queue(queue)
        check_integer("offset", offset)
        ext = {
            "topic": queue.topic,
            "group": group,
            "timestamp": -1,
            "isForce": True,
            "queueId": queue.queue_id,
            "offset": offset,
        }
        address = await self.network.broker_address(queue.topic, queue.broker_name)
        return await self._reset([address], ext)

    async def _reset(self, addresses: Iterable[str], ext: Mapping[str, object]) -> dict[MessageQueue, int]:
        found: dict[MessageQueue, int] = {}
        for address in addresses:
            answer = await self.network.ask(address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)
            table = bodies.queue_map(bodies.load_object(answer.body).get("offsetTable"))
            found.update({queue: int(str(offset)) for queue, offset in table.items()})
        return dict(sorted(found.items()))

    async def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at *timestamp_ms* or later, the end if there is none."""
        check_queue(queue)
        check_time_ms("timestamp_ms", timestamp_ms)
        return await search_offset(self.network, queue, timestamp_ms)

    # Messages

    async def message(self, message_id: str, topic: str = "") -> ReceivedMessage:
        """Return the message with this id: an offset message id or, with its *topic*, also a unique key.

        Raises:
          MessageNotFound: no broker has it.
          ConnectionLost: the broker that stored it is not reachable.
        """
        check_type("message_id", message_id, str)
        check_type("topic", topic, str)
        if topic:
            check_topic(topic)
            found = await self.messages_by_unique_key(topic, message_id)
            if found:
                return found[0]
        try:
            address, position = parse_message_id(message_id)
            split_address(address)  # raises BadAddress for port 0
            answer = await self.network.ask(
                address, RequestCode.VIEW_MESSAGE_BY_ID, {"offset": position, **({"topic": topic} if topic else {})}
            )
        except (ValueError, ClientError) as error:
            # With a topic it may be a unique key, which begins with its producer's address instead of a broker's.
            if isinstance(error, ConnectionLost | RequestTimeout) and not topic:
                raise
            raise MessageNotFound(f"message {message_id!r} was not found: {error}") from error
        message = _intact(decode_messages(answer.body, await self._broker_name(address)))
        if not message:
            raise MessageNotFound(f"message {message_id!r} is damaged")
        return message[0]

    async def messages_by_key(
        self, topic: str, key: str, *, begin_ms: int = 0, end_ms: int = 2**63 - 1, messages_max: int = KEY_RESULTS_MAX
    ) -> list[ReceivedMessage]:
        """Return up to *messages_max* messages of *topic* that have *key*, the oldest first.

        Only messages stored from *begin_ms* to *end_ms* are returned.
        """
        check_topic(topic)
        check_type("key", key, str, "for example str(key)")
        check_integer("begin_ms", begin_ms)
        check_integer("end_ms", end_ms)
        check_integer("messages_max", messages_max, 1, I32_MAX)
        found = await self._query(topic, key, begin_ms, end_ms, messages_max, unique=False)
        return [message for message in found if key in message.keys][:messages_max]

    async def messages_by_unique_key(self, topic: str, key: str) -> list[ReceivedMessage]:
        """Return the messages of *topic* with this unique key: one, or more if a send was retried."""
        check_topic(topic)
        check_type("key", key, str)
        found = await self._query(topic, key, 0, 2**63 - 1, KEY_RESULTS_MAX, unique=True)
        return [message for message in found if message.message_id == key]

    async def _query(
        self, topic: str, key: str, begin_ms: int, end_ms: int, messages_max: int, unique: bool
    ) -> list[ReceivedMessage]:
        ext: dict[str, object] = {
            "topic": topic,
            "key": key,
            "maxNum": messages_max,
            "beginTimestamp": begin_ms,
            "endTimestamp": end_ms,
        }
        if unique:
            ext["_UNIQUE_KEY_QUERY"] = True
        found: list[ReceivedMessage] = []
        for address in await self._topic_masters(topic):
            answer = await self.network.ask_any(address, RequestCode.QUERY_MESSAGE, ext)
            if answer.code == ResponseCode.SUCCESS:
                found += _intact(decode_messages(answer.body, await self._broker_name(address)))
            elif answer.code != ResponseCode.QUERY_NOT_FOUND:
                raise BrokerError(answer.code, answer.remark or "", address)
        return sorted((message for message in found if _is_of(message, topic)), key=lambda message: message.store_ms)

    # Helpers

    async def _masters(self, cluster: str | None = None) -> dict[str, str]:
        masters = (await self.cluster()).masters(cluster)
        if not masters:
            raise ClientError(f"cluster {cluster!r} has no broker" if cluster else "name server knows no broker")
        return masters

    async def _route(self, topic: str) -> TopicRoute:
        """Return the route of a topic that should exist. Raises `RouteNotFound`."""
        try:
            return await self.network.fetch_route(topic)
        except RouteNotFound as error:
            raise RouteNotFound(
                topic, "is unknown to the name server; check the name in the list of topics, or let this user see it"
            ) from error

    async def _topic_masters(self, topic: str) -> list[str]:
        route = await self._route(topic)
        masters = [address for name in sorted(route.brokers) if (address := route.master(name))]
        if not masters:
            raise RouteNotFound(topic, "has no broker with a master at the moment")
        return masters

    async def _broker_name(self, address: str) -> str:
        brokers = (await self.cluster()).brokers
        return next((name for name, addresses in brokers.items() if address in addresses.values()), "")


def _check_address(address: object) -> None:
    check_type("address", address, str, "for example '127.0.0.1:10911'")
    split_address(str(address))


def _check_cluster(cluster: object) -> None:
    if cluster is not None:
        check_type("cluster", cluster, str)


def _check_settings(settings: Mapping[str, str]) -> None:
    check_text_mapping("settings", settings)
    for name, value in settings.items():
        if "\n" in f"{name}{value}" or "=" in name:
            raise ValueError(f"setting {name!r} = {value!r} has a newline, or '=' in its name; give one line each")


def _queue_items(body: bytes) -> list[tuple[MessageQueue, bodies.Fields]]:
    table = bodies.queue_map(bodies.load_object(body).get("offsetTable"))
    found: list[tuple[MessageQueue, bodies.Fields]] = []
    for queue, item in table.items():
        if not isinstance(item, dict):
            raise BadAnswer(f"statistics of {queue} are not an object")
        found.append((queue, item))
    return found


def _member(fields: bodies.Fields) -> ConnectedMember:
    return ConnectedMember(
        bodies.text(fields, "clientId"),
        bodies.text(fields, "clientAddr"),
        bodies.text(fields, "language", ""),
        bodies.integer(fields, "version", 0),
    )


def _intact(messages: Sequence[ReceivedMessage | DamagedMessage]) -> list[ReceivedMessage]:
    return [message for message in messages if isinstance(message, ReceivedMessage)]


def _is_of(message: ReceivedMessage, topic: str) -> bool:
    """Whether *message* was stored in *topic*; the key index also finds messages of other topics with the same hash."""
    return topic in (message.queue.topic, message.topic) and (
        message.queue.topic == topic or message.queue.topic.startswith(RETRY_PREFIX)
    )


def decode_settings(body: bytes) -> dict[str, str]:
    """Return the ``name=value`` lines of *body*."""
    lines = (line.partition("=") for line in body.decode("utf-8", "replace").splitlines())
    return {name.strip(): value.strip() for name, separator, value in lines if separator}
