"""A name server and brokers in memory: they speak the protocol, store messages, and can be told to fail."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson
import trio
import trio.testing

from martlet.message import Message as StoredMessage
from martlet.message import find_property, put_property, remove_property
from martlet.records.codec import decode_record, encode_record
from martlet.runtime.clock import SystemClock
from martlet_client import ClientSettings
from martlet_remoting.wire import fastjson
from martlet_remoting.wire.batches import decode_batch
from martlet_remoting.wire.codec import FrameBuffer, encode_command, encode_response
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.headers import SendHeader, decode_pull_header, decode_send_header
from martlet_remoting.wire.packets import Command, MessageQueue

NAME_SERVER = "names:9876"
EPOCH_MS = 1_700_000_000_000

Handle = Callable[[Command], "Reply | None"]


class FakeClock:
    """The time of day, moved by trio's clock."""

    def now_ms(self) -> int:
        return EPOCH_MS + round(trio.current_time() * 1000)


@dataclass
class Reply:
    """What a fake answers; `hold` keeps it back until the event is set or the seconds are over."""

    code: int = 0
    ext: dict[str, object] = field(default_factory=dict)
    body: bytes = b""
    remark: str | None = None
    hold: trio.Event | None = None
    hold_s: float = math.inf


class Connection:
    """The server's end of one connection."""

    def __init__(self, stream: trio.abc.Stream, answer: Callable[[Command, "Connection"], Reply | None]) -> None:
        self.stream = stream
        self.answer = answer
        self.lock = trio.Lock()
        self.replies: dict[int, Command] = {}
        self.replied = trio.Event()
        self.client_ids: set[str] = set()
        self.opaque = 0

    async def serve(self, nursery: trio.Nursery) -> None:
        frames = FrameBuffer()
        while True:
            try:
                data = await self.stream.receive_some(65536)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            frames.receive_data(bytes(data))
            for command in frames.commands():
                if command.is_response:
                    self.replies[command.opaque] = command
                    self.replied.set()
                    self.replied = trio.Event()
                else:
                    nursery.start_soon(self.respond, command)

    async def respond(self, command: Command) -> None:
        reply = self.answer(command, self)
        while reply is not None and reply.hold is not None:
            with trio.move_on_after(reply.hold_s):
                await reply.hold.wait()
            # As a broker does: look once more, and then answer whatever there is.
            ext = {**command.ext, "suspendTimeoutMillis": 0, "sysFlag": 0}
            command = Command(command.code, ext, command.body, command.opaque, command.flag)
            reply = self.answer(command, self)
        if reply is not None and not command.is_oneway:
            await self.send(encode_response(command.opaque, reply.code, reply.ext, reply.body, reply.remark))

    async def send(self, data: bytes) -> None:
        async with self.lock:
            try:
                await self.stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def ask(self, code: int, ext: dict[str, object], body: bytes = b"") -> Command:
        """Send the client a request and return its answer."""
        self.opaque += 1
        opaque = self.opaque
        await self.send(encode_command(Command(code, ext, body, opaque)))
        while opaque not in self.replies:
            await self.replied.wait()
        return self.replies.pop(opaque)

    async def tell(self, code: int, ext: dict[str, object], body: bytes = b"") -> None:
        await self.send(encode_command(Command(code, ext, body, flag=FLAG_ONEWAY)))


class Broker:
    """One fake broker; `overrides` answer instead of it, `requests` has everything it was asked."""

    def __init__(self, cluster: "Cluster", name: str, address: str) -> None:
        self.cluster = cluster
        self.name = name
        self.address = address
        self.down = False
        self.requests: list[Command] = []
        self.overrides: dict[int, Handle] = {}
        self.queues: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        self.arrived = trio.Event()
        self.offsets: dict[tuple[str, str, int], int] = {}
        self.members: dict[str, dict[str, Connection]] = defaultdict(dict)
        self.locks: dict[tuple[str, MessageQueue], str] = {}
        self.connections: list[Connection] = []
        self.position = 0

    def asked(self, code: int) -> list[Command]:
        return [command for command in self.requests if command.code == code]

    def answer(self, command: Command, connection: Connection) -> Reply | None:
        self.requests.append(command)
        override = self.overrides.get(command.code)
        if override is not None:
            return override(command)
        handler = HANDLERS.get(command.code)
        if handler is None:
            return Reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=f"{command.code}")
        return handler(self, command, connection)

    def store(self, topic: str, queue_id: int, message: StoredMessage) -> tuple[int, str]:
        """Store a message; return its queue offset and its offset message id."""
        records = self.queues[topic, queue_id]
        host = bytes([127, 0, 0, 1, 0, 0, 0, 1])
        message.queue_id = queue_id
        now = self.cluster.clock.now_ms()
        record = encode_record(message, queue_id, len(records), self.position, now, host)
        offset = len(records)
        records.append(record)
        name = (host + self.position.to_bytes(8, "big")).hex().upper()
        self.position += len(record)
        self.arrived.set()
        self.arrived = trio.Event()
        return offset, name

    def put(self, topic: str, queue_id: int, body: bytes, tags: str = "", properties: bytes = b"") -> int:
        """Store a message as a producer would have; return its queue offset."""
        properties = put_property(properties, b"TAGS", tags.encode()) if tags else properties
        return self.store(topic, queue_id, StoredMessage(topic, body, properties))[0]

    def send(self, command: Command, connection: Connection) -> Reply:
        header = decode_send_header(command)
        if header.batch:
            members = [(member.body, member.properties) for member in decode_batch(command.body)]
        else:
            members = [(command.body, header.properties.encode())]
        places = [self.store(header.topic, header.queue_id, self.message(header, *member)) for member in members]
        ext = {"msgId": ",".join(name for _, name in places), "queueId": header.queue_id, "queueOffset": places[0][0]}
        return Reply(0, {**ext, "MSG_REGION": "DefaultRegion", "TRACE_ON": True})

    def message(self, header: SendHeader, body: bytes, properties: bytes) -> StoredMessage:
        return StoredMessage(
            header.topic,
            body,
            properties,
            sys_flag=header.sys_flag,
            born_ms=header.born_ms,
            reconsume_times=header.reconsume_times,
        )

    def send_reply(self, command: Command, connection: Connection) -> Reply:
        """Store a reply and push it to the requester, as a broker does."""
        header = decode_send_header(command)
        client_id = find_property(header.properties.encode(), b"REPLY_TO_CLIENT").decode()
        requester = next((found for found in self.connections if client_id in found.client_ids), None)
        if requester is None:
            return Reply(
                ResponseCode.SYSTEM_ERROR, remark=f"push reply message fail, channel of <{client_id}> not found."
            )
        ext: dict[str, object] = {
            "topic": header.topic,
            "sysFlag": header.sys_flag,
            "bornTimestamp": header.born_ms,
            "storeTimestamp": self.cluster.clock.now_ms(),
            "properties": header.properties,
        }
        self.cluster.nursery.start_soon(requester.ask, RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, ext, command.body)
        return self.send(command, connection)

    def pull(self, command: Command, connection: Connection) -> Reply:
        header = decode_pull_header(command)
        records = self.queues[header.topic, header.queue_id]
        ext: dict[str, object] = {"minOffset": 0, "maxOffset": len(records), "suggestWhichBrokerId": 0}
        if header.offset > len(records):
            return Reply(ResponseCode.PULL_OFFSET_MOVED, {**ext, "nextBeginOffset": len(records)})
        found = records[header.offset : header.offset + header.messages_max]
        ext["nextBeginOffset"] = header.offset + len(found)
        if found:
            return Reply(0, ext, b"".join(found))
        held = self.arrived if header.suspend_ms else None
        return Reply(ResponseCode.PULL_NOT_FOUND, ext, hold=held, hold_s=header.suspend_ms / 1000)

    def heartbeat(self, command: Command, connection: Connection) -> Reply:
        body = orjson.loads(command.body)
        connection.client_ids.add(body["clientID"])
        for consumer in body["consumerDataSet"]:
            members = self.members[consumer["groupName"]]
            is_new = body["clientID"] not in members
            members[body["clientID"]] = connection
            self.cluster.topics.setdefault("%RETRY%" + consumer["groupName"], 1)
            if is_new:
                self.notify(consumer["groupName"])
        return Reply()

    def notify(self, group: str) -> None:
        for connection in self.members[group].values():
            ext: dict[str, object] = {"consumerGroup": group}
            self.cluster.nursery.start_soon(connection.tell, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, ext)

    def unregister(self, command: Command, connection: Connection) -> Reply:
        group = command.text("consumerGroup", "")
        if self.members[group].pop(command.text("clientID"), None):
            self.notify(group)
        return Reply()

    def member_list(self, command: Command, connection: Connection) -> Reply:
        members = list(self.members[command.text("consumerGroup")])
        if not members:
            return Reply(ResponseCode.SYSTEM_ERROR, remark="no consumer for this group")
        return Reply(body=orjson.dumps({"consumerIdList": members}))

    def query_offset(self, command: Command, connection: Connection) -> Reply:
        key = command.text("consumerGroup"), command.text("topic"), command.integer("queueId")
        if key not in self.offsets:
            return Reply(ResponseCode.QUERY_NOT_FOUND, remark="not found")
        return Reply(0, {"offset": self.offsets[key]})

    def update_offset(self, command: Command, connection: Connection) -> Reply:
        key = command.text("consumerGroup"), command.text("topic"), command.integer("queueId")
        self.offsets[key] = command.integer("commitOffset")
        return Reply()

    def max_offset(self, command: Command, connection: Connection) -> Reply:
        return Reply(0, {"offset": len(self.queues[command.text("topic"), command.integer("queueId")])})

    def min_offset(self, command: Command, connection: Connection) -> Reply:
        return Reply(0, {"offset": 0})

    def lock(self, command: Command, connection: Connection) -> Reply:
        body = orjson.loads(command.body)
        locked = []
        for item in body["mqSet"]:
            key = body["consumerGroup"], MessageQueue(item["topic"], item["brokerName"], item["queueId"])
            if self.locks.setdefault(key, body["clientId"]) == body["clientId"]:
                locked.append(item)
        return Reply(body=orjson.dumps({"lockOKMQSet": locked}))

    def unlock(self, command: Command, connection: Connection) -> Reply:
        body = orjson.loads(command.body)
        for item in body["mqSet"]:
            key = body["consumerGroup"], MessageQueue(item["topic"], item["brokerName"], item["queueId"])
            if self.locks.get(key) == body["clientId"]:
                del self.locks[key]
        return Reply()

    def send_back(self, command: Command, connection: Connection) -> Reply:
        position = command.integer("offset")
        for records in list(self.queues.values()):
            for record in records:
                if int.from_bytes(record[28:36], "big") == position:
                    self.redeliver(record, command.text("group"))
                    return Reply()
        return Reply(ResponseCode.SYSTEM_ERROR, remark="look message by offset failed")

    def redeliver(self, record: bytes, group: str) -> None:
        """Put a copy into the retry topic at once, as a broker without delays would."""
        old = decode_record(record, check_body=False)
        properties = put_property(remove_property(old.properties, b"DELAY"), b"RETRY_TOPIC", old.topic.encode())
        times = old.reconsume_times + 1
        self.store(f"%RETRY%{group}", 0, StoredMessage("%RETRY%" + group, old.body, properties, reconsume_times=times))

    async def drop_connections(self) -> None:
        """Lose every connection, and forget who was on them."""
        self.members.clear()
        for connection in self.connections:
            await trio.aclose_forcefully(connection.stream)
        self.connections.clear()


HANDLERS: dict[int, Callable[[Broker, Command, Connection], Reply | None]] = {
    RequestCode.SEND_MESSAGE_V2: Broker.send,
    RequestCode.SEND_BATCH_MESSAGE: Broker.send,
    RequestCode.SEND_REPLY_MESSAGE_V2: Broker.send_reply,
    RequestCode.PULL_MESSAGE: Broker.pull,
    RequestCode.HEART_BEAT: Broker.heartbeat,
    RequestCode.UNREGISTER_CLIENT: Broker.unregister,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: Broker.member_list,
    RequestCode.QUERY_CONSUMER_OFFSET: Broker.query_offset,
    RequestCode.UPDATE_CONSUMER_OFFSET: Broker.update_offset,
    RequestCode.GET_MAX_OFFSET: Broker.max_offset,
    RequestCode.GET_MIN_OFFSET: Broker.min_offset,
    RequestCode.LOCK_BATCH_MQ: Broker.lock,
    RequestCode.UNLOCK_BATCH_MQ: Broker.unlock,
    RequestCode.CONSUMER_SEND_MSG_BACK: Broker.send_back,
}


class Cluster:
    """A name server and brokers; topics have the same number of queues on every broker."""

    def __init__(self, nursery: trio.Nursery, brokers: int = 1) -> None:
        self.nursery = nursery
        self.clock = FakeClock()
        self.topics: dict[str, int] = {"T": 4, "TBW102": 8}
        self.brokers = [Broker(self, f"broker-{letter}", f"{letter}:1") for letter in "abcdefgh"[:brokers]]
        self.name_requests: list[Command] = []
        self.overrides: dict[int, Handle] = {}
        self.names_down: set[str] = set()
        self.connected: list[str] = []
        self.open: list[Connection] = []

    async def stop(self) -> None:
        """Let all servers stop: connections break, and new ones are refused."""
        self.names_down.add(NAME_SERVER)
        for broker in self.brokers:
            broker.down = True
        while self.open:
            await self.open.pop().stream.aclose()

    def restart(self) -> None:
        self.names_down.clear()
        for broker in self.brokers:
            broker.down = False

    @property
    def broker(self) -> Broker:
        return self.brokers[0]

    def settings(self, client_id: str = "", name_server: str = NAME_SERVER) -> ClientSettings:
        return ClientSettings(name_server, client_id=client_id, connect=self.connect, clock=self.clock)

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        address = f"{host}:{port}"
        self.connected.append(address)
        broker = next((found for found in self.brokers if found.address == address), None)
        if address in self.names_down or (broker is not None and broker.down) or (not broker and port != 9876):
            raise OSError("connection refused")
        ours, theirs = trio.testing.memory_stream_pair()
        answer = broker.answer if broker is not None else self.say_nothing if host == "mute" else self.answer
        connection = Connection(theirs, answer)
        self.open.append(connection)
        if broker is not None:
            broker.connections.append(connection)
        self.nursery.start_soon(connection.serve, self.nursery)
        return ours

    def say_nothing(self, command: Command, connection: Connection) -> None:
        """A name server that takes requests and does not answer."""

    def cluster_info(self) -> dict[str, object]:
        brokers = {
            broker.name: {"brokerAddrs": {0: broker.address}, "brokerName": broker.name, "cluster": "c"}
            for broker in self.brokers
        }
        return {"brokerAddrTable": brokers, "clusterAddrTable": {"c": [broker.name for broker in self.brokers]}}

    def answer(self, command: Command, connection: Connection) -> Reply:
        """The name server."""
        self.name_requests.append(command)
        override = self.overrides.get(command.code)
        if override is not None:
            found = override(command)
            assert found is not None
            return found
        if command.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return Reply(body=fastjson.dumps(self.cluster_info()))
        if command.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            return Reply(body=fastjson.dumps({"topicList": list(self.topics)}))
        topic = command.text("topic", "")
        if command.code != RequestCode.GET_ROUTEINFO_BY_TOPIC or topic not in self.topics:
            return Reply(ResponseCode.TOPIC_NOT_EXIST, remark=f"No topic route info in name server for: {topic}")
        count = self.topics[topic]
        live = [broker for broker in self.brokers if not broker.down]
        route = {
            "brokerDatas": [
                {"brokerAddrs": {0: broker.address}, "brokerName": broker.name, "cluster": "c"} for broker in live
            ],
            "filterServerTable": {},
            "queueDatas": [
                {"brokerName": broker.name, "perm": 6, "readQueueNums": count, "writeQueueNums": count}
                for broker in live
            ],
        }
        return Reply(body=fastjson.dumps(route))


class ThreadCluster:
    """A cluster that lives in whatever trio thread first connects to it; *prepare* is given it before."""

    def __init__(self, prepare: Callable[[Cluster], object] = lambda cluster: None) -> None:
        self.prepare = prepare
        self.cluster: Cluster | None = None

    def settings(self) -> ClientSettings:
        # Real time passes here; it must not count while the machine stalls.
        return ClientSettings(NAME_SERVER, request_timeout_s=120, connect=self.connect, clock=SystemClock())

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        if self.cluster is None:
            started = trio.Event()
            trio.lowlevel.spawn_system_task(self.live, started)
            await started.wait()
        assert self.cluster is not None
        return await self.cluster.connect(host, port)

    async def live(self, started: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            if self.cluster is None:
                self.cluster = Cluster(nursery)
                self.prepare(self.cluster)
            started.set()
            await trio.sleep_forever()
