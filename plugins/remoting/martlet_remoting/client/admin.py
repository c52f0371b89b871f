"""Administration: topics, groups, offsets, brokers, and finding messages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import trio

from martlet_remoting.codes import RequestCode, ResponseCode
from martlet_remoting.packets import MessageQueue

from . import bodies
from .errors import BadAnswer, BrokerError, ClientError, MessageNotFound, RouteNotFound
from .messages import RETRY_PREFIX, DamagedMessage, ReceivedMessage, check_group, check_topic, parse_message_id
from .network import TEMPLATE_TOPIC, Client, Settings
from .offsets import BrokerOffsets, max_offset, search_offset
from .pulling import decode_messages
from .routes import MASTER_ID, Route

__all__ = ["Admin", "Cluster", "Member", "QueueLag", "QueueStats"]

PERM_READ_WRITE: Final = 6
DELETE_TIMEOUT_S: Final = 10.0
KEY_RESULTS_MAX: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """The brokers that name servers know: names by cluster, and addresses by name and broker id."""

    clusters: Mapping[str, tuple[str, ...]]
    brokers: Mapping[str, Mapping[int, str]]

    def masters(self, cluster: str | None = None) -> dict[str, str]:
        """Return the master addresses by broker name, of one cluster or of all."""
        names = self.brokers.keys() if cluster is None else self.clusters.get(cluster, ())
        found = {name: self.brokers.get(name, {}).get(MASTER_ID) for name in sorted(names)}
        return {name: address for name, address in found.items() if address is not None}


@final
@dataclass(frozen=True, slots=True)
class QueueStats:
    """What a queue holds: from ``min_offset`` to before ``max_offset``; 0 is never updated."""

    queue: MessageQueue
    min_offset: int
    max_offset: int
    last_update_ms: int


@final
@dataclass(frozen=True, slots=True)
class QueueLag:
    """How far a group is in a queue; ``last_consumed_ms`` is the store time of what it consumed last."""

    queue: MessageQueue
    broker_offset: int
    consumer_offset: int
    last_consumed_ms: int

    @property
    def lag(self) -> int:
        """How many messages are still to be consumed."""
        return self.broker_offset - self.consumer_offset


@final
@dataclass(frozen=True, slots=True)
class Member:
    """A connected member of a consumer group, as a broker lists it."""

    client_id: str
    address: str
    language: str
    version: int


@final
class Admin(Client):
    """Asks and changes what the brokers of all clusters hold.

    async with Admin("127.0.0.1:9876") as admin:
        await admin.create_topic("Greetings", queues=8)
    """

    def __init__(self, name_server: str | Settings) -> None:
        super().__init__(Settings.of(name_server))

    async def _open(self, nursery: trio.Nursery) -> None:
        """Connections are opened by the first call."""

    async def _close(self) -> None:
        """Nothing was registered."""

    # Clusters and brokers

    async def cluster(self) -> Cluster:
        """Return all brokers by cluster."""
        answer = await self.network.ask_name_server(RequestCode.GET_BROKER_CLUSTER_INFO, {})
        fields = bodies.load_object(answer.body)
        clusters = bodies.mapping(fields, "clusterAddrTable")
        brokers: dict[str, dict[int, str]] = {}
        for name, data in bodies.mapping(fields, "brokerAddrTable").items():
            addresses = bodies.mapping(data, "brokerAddrs") if isinstance(data, dict) else {}
            brokers[str(name)] = {int(str(key)): str(address) for key, address in addresses.items()}
        names = {str(name): tuple(sorted(bodies.texts(clusters, str(name)))) for name in clusters}
        return Cluster(names, brokers)

    async def broker_config(self, address: str) -> dict[str, str]:
        """Return every setting of the broker at *address*."""
        answer = await self.network.ask(address, RequestCode.GET_BROKER_CONFIG, {})
        return decode_settings(answer.body)

    async def update_broker_config(self, address: str, settings: Mapping[str, str]) -> None:
        """Change settings of the broker at *address*; what it does not know it ignores."""
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        await self.network.ask(address, RequestCode.UPDATE_BROKER_CONFIG, {}, text.encode())

    async def broker_runtime(self, address: str) -> dict[str, str]:
        """Return the counters of the broker at *address*."""
        answer = await self.network.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {})
        table = bodies.mapping(bodies.load_object(answer.body), "table")
        return {str(name): str(value) for name, value in table.items()}

    # Topics

    async def topics(self) -> list[str]:
        """Return the names of all topics, those of the system among them."""
        answer = await self.network.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {})
        return sorted(bodies.texts(bodies.load_object(answer.body), "topicList"))

    async def topic_route(self, topic: str) -> Route:
        """Return the brokers and queues of *topic*; raises RouteNotFound when there is none."""
        return await self.network.fetch_route(topic)

    async def create_topic(
        self,
        topic: str,
        *,
        queues: int = 8,
        perm: int = PERM_READ_WRITE,
        cluster: str | None = None,
        attributes: str = "",
    ) -> list[str]:
        """Create or change *topic* on every broker, or on those of one cluster; return the brokers' names."""
        check_topic(topic)
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
        """Delete *topic* from every broker and name server; its messages go with the log's retention."""
        ext = {"topic": topic}
        for address in (await self._masters()).values():
            await self.network.ask(address, RequestCode.DELETE_TOPIC_IN_BROKER, ext, b"", DELETE_TIMEOUT_S)
        for address in self.network.settings.name_servers():
            await self.network.ask(address, RequestCode.DELETE_TOPIC_IN_NAMESRV, ext)
        self.network.routes.pop(topic, None)

    async def topic_stats(self, topic: str) -> list[QueueStats]:
        """Return what each queue of *topic* holds, in order."""
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
        """Return the names of all consumer groups that brokers have a configuration of."""
        found: set[str] = set()
        for address in (await self._masters()).values():
            answer = await self.network.ask(address, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {})
            table = bodies.mapping(bodies.load_object(answer.body), "subscriptionGroupTable")
            found.update(map(str, table))
        return sorted(found)

    async def create_group(
        self, group: str, *, consume_enable: bool = True, retry_max_times: int = 16, cluster: str | None = None
    ) -> None:
        """Create or change *group* on every broker, or on those of one cluster."""
        check_group(group)
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
        """Delete *group* from every broker, with its committed offsets if wanted."""
        ext = {"groupName": group, "cleanOffset": offsets_too}
        for address in (await self._masters()).values():
            await self.network.ask(address, RequestCode.DELETE_SUBSCRIPTIONGROUP, ext)

    async def group_members(self, group: str) -> list[Member]:
        """Return the connected members of *group*; empty when it is offline."""
        found: set[Member] = set()
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
        """Return how far *group* is in each queue that it has an offset of, in order."""
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
        """Let *group* go on at what was stored at *timestamp_ms* or later, -1 for the end; return the new offsets.

        Connected members follow within seconds.
        """
        ext = {"topic": topic, "group": group, "timestamp": timestamp_ms, "isForce": True}
        try:
            return await self._reset(await self._topic_masters(topic), ext)
        except BrokerError as error:
            if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
                raise
        return await self._commit_reset(group, topic, timestamp_ms)

    async def _commit_reset(self, group: str, topic: str, timestamp_ms: int) -> dict[MessageQueue, int]:
        """Reset a group that is not online ourselves: RocketMQ before 5 leaves that to its tools."""
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
        """Let *group* go on at *offset* of one queue."""
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
        """Return the first offset stored at *timestamp_ms* or later; the maximum if there is none."""
        return await search_offset(self.network, queue, timestamp_ms)

    # Messages

    async def message(self, message_id: str, topic: str = "") -> ReceivedMessage:
        """Return the message with an offset message id or, given its *topic*, with a unique key.

        Raises:
          MessageNotFound: no broker has it.
        """
        if topic:
            found = await self.messages_by_unique_key(topic, message_id)
            if found:
                return found[0]
        try:
            address, position = parse_message_id(message_id)
            answer = await self.network.ask(
                address, RequestCode.VIEW_MESSAGE_BY_ID, {"offset": position, **({"topic": topic} if topic else {})}
            )
        except (ValueError, ClientError) as error:
            raise MessageNotFound(f"message {message_id!r} was not found: {error}") from error
        message = _intact(decode_messages(answer.body, await self._broker_name(address)))
        if not message:
            raise MessageNotFound(f"message {message_id!r} is damaged")
        return message[0]

    async def messages_by_key(
        self, topic: str, key: str, *, begin_ms: int = 0, end_ms: int = 2**63 - 1, messages_max: int = KEY_RESULTS_MAX
    ) -> list[ReceivedMessage]:
        """Return the messages of *topic* that have *key*, the oldest first."""
        found = await self._query(topic, key, begin_ms, end_ms, messages_max, unique=False)
        return [message for message in found if key in message.keys][:messages_max]

    async def messages_by_unique_key(self, topic: str, key: str) -> list[ReceivedMessage]:
        """Return the messages of *topic* with this unique key: one, or more if a send was repeated."""
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

    async def _topic_masters(self, topic: str) -> list[str]:
        route = await self.network.fetch_route(topic)
        masters = [address for name in sorted(route.brokers) if (address := route.master(name))]
        if not masters:
            raise RouteNotFound(topic, "has no broker with a master at the moment")
        return masters

    async def _broker_name(self, address: str) -> str:
        brokers = (await self.cluster()).brokers
        return next((name for name, addresses in brokers.items() if address in addresses.values()), "")


def _queue_items(body: bytes) -> list[tuple[MessageQueue, bodies.Fields]]:
    table = bodies.queue_map(bodies.load_object(body).get("offsetTable"))
    found: list[tuple[MessageQueue, bodies.Fields]] = []
    for queue, item in table.items():
        if not isinstance(item, dict):
            raise BadAnswer(f"statistics of {queue} are not an object")
        found.append((queue, item))
    return found


def _member(fields: bodies.Fields) -> Member:
    return Member(
        bodies.text(fields, "clientId"),
        bodies.text(fields, "clientAddr"),
        bodies.text(fields, "language", ""),
        bodies.integer(fields, "version", 0),
    )


def _intact(messages: Sequence[ReceivedMessage | DamagedMessage]) -> list[ReceivedMessage]:
    return [message for message in messages if isinstance(message, ReceivedMessage)]


def _is_of(message: ReceivedMessage, topic: str) -> bool:
    """Whether it was stored in *topic*; the key index finds others with the same hash too."""
    return topic in (message.queue.topic, message.topic) and (
        message.queue.topic == topic or message.queue.topic.startswith(RETRY_PREFIX)
    )


def decode_settings(body: bytes) -> dict[str, str]:
    """Return the ``name=value`` lines of *body*."""
    lines = (line.partition("=") for line in body.decode("utf-8", "replace").splitlines())
    return {name.strip(): value.strip() for name, separator, value in lines if separator}
