"""Requests to the name server: what each answers, byte for byte where clients depend on it."""

import struct
import tracemalloc
import zlib

import orjson
import pytest
import trio

from martlet.runtime.steps import finish_now
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.kvconfig import KVConfig
from martlet_remoting.nameserver.requests import REQUESTS, answer, answer_when_saved
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codec import decode_frame
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import joined

OLD, NEW = 399, 401


class Station:
    """A name server with what it saved, asked over one connection."""

    def __init__(self, config: NameServerConfig | None = None) -> None:
        self.saved: list[bytes] = []
        self.server = NameServer(config or NameServerConfig(), self._save)

    def ask(self, code: int, body: bytes = b"", version: int = NEW, /, **ext: object) -> Command:
        command = Command(code, ext, body, opaque=7, language="JAVA", version=version)
        answered = decode_frame(joined(finish_now(answer(self.server, "line", command))))
        assert answered.is_response
        assert answered.opaque == 7
        return answered

    async def _save(self, data: bytes) -> None:
        self.saved.append(data)

    async def save(self, code: int, **ext: object) -> None:
        """Ask for a change that is answered once it is saved."""
        answered = decode_frame(await answer_when_saved(self.server, Command(code, ext, b"", opaque=7)))
        assert (answered.code, answered.remark, answered.opaque) == (ResponseCode.SUCCESS, None, 7)

    def good(self, code: int, body: bytes = b"", version: int = NEW, /, **ext: object) -> Command:
        answered = self.ask(code, body, version, **ext)
        assert (answered.code, answered.remark) == (ResponseCode.SUCCESS, None)
        return answered

    def register(
        self, name: str = "b", number: int = 0, topics: tuple[str, ...] = ("T", "U"), **ext: object
    ) -> Command:
        return self.good(
            RequestCode.REGISTER_BROKER,
            registration_body(*topics),
            clusterName="c",
            brokerName=name,
            brokerId=number,
            brokerAddr=f"{name}:{number}",
            haServerAddr=f"ha:{number}",
            **ext,
        )


def topic_config(name: str, flag: int = 0) -> dict[str, object]:
    return {
        "attributes": {},
        "order": False,
        "perm": 6,
        "readQueueNums": 4,
        "topicFilterType": "SINGLE_TAG",
        "topicName": name,
        "topicSysFlag": flag,
        "writeQueueNums": 4,
    }


def wrapper(*topics: str) -> dict[str, object]:
    return {
        "dataVersion": {"counter": 3, "stateVersion": 0, "timestamp": 5},
        "topicConfigTable": {name: topic_config(name, len(name) - 1) for name in topics},
    }


def registration_body(*topics: str) -> bytes:
    return orjson.dumps({"filterServerList": [], "topicConfigSerializeWrapper": wrapper(*topics)})


@pytest.fixture
async def station() -> Station:
    return Station()


OLD_ROUTE = (
    b'{"brokerDatas":[{"brokerAddrs":{0:"b:0",1:"b:1"},"brokerName":"b","cluster":"c","enableActingMaster":false}],'
    b'"filterServerTable":{},"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)


async def test_route_in_both_dialects(station: Station) -> None:
    station.register("b", 0)
    station.register("b", 1)
    code = RequestCode.GET_ROUTEINFO_BY_TOPIC
    assert station.good(code, b"", OLD, topic="T").body == OLD_ROUTE
    standard = OLD_ROUTE.replace(b"{0:", b'{"0":').replace(b",1:", b',"1":')
    assert station.good(code, b"", NEW, topic="T").body == standard
    assert station.good(code, b"", OLD, topic="T", acceptStandardJsonOnly="true").body == standard


async def test_standard_route_is_ascii(station: Station) -> None:
    station.register("bröker-\U0001f600")
    body = station.good(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").body
    assert b'"brokerName":"br\\u00F6ker-\\uD83D\\uDE00"' in body
    assert orjson.loads(body)["queueDatas"][0]["brokerName"] == "bröker-\U0001f600"


async def test_unknown_topic_has_no_route(station: Station) -> None:
    station.register()
    refused = station.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="nowhere")
    assert refused.code == ResponseCode.TOPIC_NOT_EXIST
    assert str(refused.remark).startswith("No topic route info in name server for the topic: nowhere")


async def test_slave_gets_the_address_of_its_master(station: Station) -> None:
    assert station.register("b", 0).ext == {}
    assert station.register("b", 1).ext == {"masterAddr": "b:0", "haServerAddr": "ha:0"}


async def test_single_topic_first_is_refused(station: Station) -> None:
    ext = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0", "haServerAddr": "h"}
    refused = station.ask(RequestCode.REGISTER_BROKER, registration_body("T"), **ext)
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "register broker failed" in str(refused.remark)


def compressed(*topics: str, mappings: tuple[bytes, ...] = ()) -> bytes:
    def text(data: bytes) -> bytes:
        return struct.pack(">i", len(data)) + data

    parts = [text(b'{"counter":3,"stateVersion":0,"timestamp":5}'), struct.pack(">i", len(topics))]
    parts += [text(f'{name} 4 4 6 SINGLE_TAG {{"a":"b c"}}'.encode()) for name in topics]
    parts += [text(b"[]"), struct.pack(">i", len(mappings)), *map(text, mappings)]
    return zlib.compress(b"".join(parts))


async def test_compressed_registration_says_the_same(station: Station) -> None:
    body = compressed("T", "U", mappings=(b'{"topic":"T","bname":"b","currIdMap":{0:0},"totalQueues":4}',))
    ext = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0", "haServerAddr": "h"}
    crc = zlib.crc32(body) & 0x7FFFFFFF
    station.good(RequestCode.REGISTER_BROKER, body, 479, compressed="true", bodyCrc32=crc, **ext)
    route = orjson.loads(station.good(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").body)
    assert route["queueDatas"][0] == {
        "brokerName": "b",
        "perm": 6,
        "readQueueNums": 4,
        "topicSysFlag": 0,
        "writeQueueNums": 4,
    }
    assert route["topicQueueMappingByBroker"]["b"]["totalQueues"] == 4
    assert route["topicQueueMappingByBroker"]["b"]["currIdMap"] == {"0": 0}


async def test_compressed_registration_is_known_by_its_body(station: Station) -> None:
    ext = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0", "haServerAddr": "h"}
    station.good(RequestCode.REGISTER_BROKER, compressed("T", "U"), 513, compressed="false", **ext)
    assert finish_now(station.server.table.index.names()) == ["T", "U"]


async def test_brokers_of_old_send_the_bare_table(station: Station) -> None:
    ext = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0", "haServerAddr": "h"}
    station.good(RequestCode.REGISTER_BROKER, orjson.dumps(wrapper("T", "U")), 36, **ext)
    assert finish_now(station.server.table.index.names()) == ["T", "U"]


BROKEN = [
    (b"{", {}),
    (b"[]", {}),
    (b'{"topicConfigSerializeWrapper":5}', {}),
    (b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":5,"U":6}}}', {}),
    (b"no deflate", {"compressed": "true"}),
    (compressed("T")[:-5], {"compressed": "true"}),
    (zlib.compress(b"\x7f\xff\xff\xff"), {"compressed": "true"}),
    (zlib.compress(b"\x00\x00\x00\x02{}\x00\x00\x00\x01\x00\x00\x00\x02\xff\xff"), {"compressed": "true"}),
    (zlib.compress(b"\x00\x00\x00\x02{}\x00\x00\x00\x00\x00\x00\x00\x01{"), {"compressed": "true"}),
    (registration_body("T" * 600, "U"), {}),
    (registration_body("T", "U"), {"brokerName": "b" * 600}),
    (zlib.compress(b"\x00\x00\x00\x02{}\x7f\x00\x00\x00"), {"compressed": "true"}),
    (zlib.compress(b"\x00\x00\x00\x02{}\x00\x00\x00\x01\x00\x00\x00\x01T"), {"compressed": "true"}),
    (registration_body("T", "U"), {"bodyCrc32": "5"}),
    (registration_body("T", "U"), {"brokerId": "x"}),
]


@pytest.mark.parametrize(("body", "ext"), BROKEN)
async def test_broken_registration_is_refused_and_changes_nothing(body: bytes, ext: dict[str, str]) -> None:
    station = Station()
    fields = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0", "haServerAddr": "h", **ext}
    refused = station.ask(RequestCode.REGISTER_BROKER, body, 479, **fields)
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert refused.remark
    assert station.server.table.statistics() == {"brokers": 0, "clusters": 0, "topics": 0, "topics_of_all_brokers": 0}


async def test_deflate_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet_remoting.wire.register_broker.INFLATED_BYTES_MAX", 1000)
    ext = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0", "haServerAddr": "h"}
    body = zlib.compress(bytes(100_000))
    refused = Station().ask(RequestCode.REGISTER_BROKER, body, 479, compressed="true", **ext)
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "over 1000 bytes" in str(refused.remark)


BROKER = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0", "haServerAddr": "h"}


@pytest.mark.parametrize("packed", [True, False])
async def test_a_large_registration_is_read_and_taken_in_slices(packed: bool) -> None:
    station = Station()
    names = [f"t{number}" for number in range(20_000)]
    body = compressed(*names) if packed else registration_body(*names)
    command = Command(RequestCode.REGISTER_BROKER, {**BROKER, "compressed": packed}, body, 7, version=479)
    slices = sum(1 for _ in answer(station.server, "line", command))
    assert slices > 100
    assert finish_now(station.server.table.index.names()) == names


@pytest.mark.parametrize("packed", [True, False])
async def test_a_registration_of_more_topics_than_brokers_have_is_refused(packed: bool) -> None:
    station = Station(NameServerConfig(broker_topics_max=3))
    body = compressed(*"TUVW") if packed else registration_body(*"TUVW")
    refused = station.ask(RequestCode.REGISTER_BROKER, body, 479, compressed=packed, **BROKER)
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert "broker registers 4 topics; nameserver.broker_topics_max is 3" in str(refused.remark)
    assert station.server.table.statistics()["brokers"] == 0


async def test_a_registration_inflates_no_more_than_it_reads() -> None:
    text = struct.pack(">i", 2) + b"{}" + struct.pack(">i", 1) + struct.pack(">i", 1 << 28)
    bomb = zlib.compress(text + bytes(1 << 26))
    tracemalloc.start()
    try:
        refused = Station().ask(RequestCode.REGISTER_BROKER, bomb, 479, compressed="true", **BROKER)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "has a text of 268435456 bytes" in str(refused.remark)
    assert peak < 1 << 20


async def test_values_without_end_in_a_registration_are_refused() -> None:
    station = Station(NameServerConfig(broker_topics_max=10))
    body = b'{"a":[' + b",".join([b"[]"] * 90_000) + b"]}"
    refused = station.ask(RequestCode.REGISTER_BROKER, body, 479, **BROKER)
    assert "values are too many" in str(refused.remark)


async def test_a_broker_keeps_its_routes_when_others_fill_the_table(caplog: pytest.LogCaptureFixture) -> None:
    station = Station(NameServerConfig(topics_max=5))
    station.register("b", 0, ("T", "U"))
    flood = {**BROKER, "brokerName": "flood", "brokerAddr": "flood:0"}
    answered = station.ask(RequestCode.REGISTER_BROKER, compressed(*"VWXYZ"), 479, compressed="true", **flood)
    assert answered.code == ResponseCode.SUCCESS
    assert "2 new topics of broker 'flood' have no route; the table is full" in str(answered.remark)
    assert "nameserver.topics_max is 5" in caplog.text
    ext = {**BROKER, "heartbeatTimeoutMillis": "60000"}
    answered = station.ask(RequestCode.REGISTER_BROKER, registration_body("T", "U", "N"), 479, **ext)
    assert answered.code == ResponseCode.SUCCESS
    assert station.good(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").body
    asked = station.good(RequestCode.QUERY_DATA_VERSION, b'{"counter":3,"stateVersion":0,"timestamp":5}', **BROKER)
    assert asked.ext == {"changed": "true"}, "so it tells them again, when there may be room"


async def test_unregistered_broker_is_gone(station: Station) -> None:
    station.register()
    station.good(RequestCode.UNREGISTER_BROKER, clusterName="c", brokerName="b", brokerAddr="b:0", brokerId="0")
    assert station.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").code == ResponseCode.TOPIC_NOT_EXIST


async def test_known_version_counts_as_a_heartbeat(station: Station) -> None:
    ext = {"clusterName": "c", "brokerName": "b", "brokerAddr": "b:0", "brokerId": "0"}
    same = b'{"counter":3,"stateVersion":0,"timestamp":5}'
    asked = station.good(RequestCode.QUERY_DATA_VERSION, same, **ext)
    assert (asked.ext, asked.body) == ({"changed": "true"}, b"")
    station.register()
    asked = station.good(RequestCode.QUERY_DATA_VERSION, same, **ext)
    assert (asked.ext, asked.body) == ({"changed": "false"}, same)
    asked = station.good(RequestCode.QUERY_DATA_VERSION, same.replace(b"3", b"4"), **ext)
    assert (asked.ext, asked.body) == ({"changed": "true"}, same)
    station.good(RequestCode.BROKER_HEARTBEAT, **ext)


async def test_cluster_info_has_bare_ids_for_everyone(station: Station) -> None:
    station.register("a")
    station.register("b")
    assert station.good(RequestCode.GET_BROKER_CLUSTER_INFO).body == (
        b'{"brokerAddrTable":{'
        b'"a":{"brokerAddrs":{0:"a:0"},"brokerName":"a","cluster":"c","enableActingMaster":false},'
        b'"b":{"brokerAddrs":{0:"b:0"},"brokerName":"b","cluster":"c","enableActingMaster":false}},'
        b'"clusterAddrTable":{"c":["a","b"]}}'
    )


async def test_member_group(station: Station) -> None:
    station.register("b", 0)
    station.register("b", 2)
    asked = station.good(RequestCode.GET_BROKER_MEMBER_GROUP, clusterName="c", brokerName="b")
    assert asked.body == (b'{"brokerMemberGroup":{"brokerAddrs":{0:"b:0",2:"b:2"},"brokerName":"b","cluster":"c"}}')
    asked = station.good(RequestCode.GET_BROKER_MEMBER_GROUP, clusterName="c", brokerName="x")
    assert asked.body == b'{"brokerMemberGroup":{"brokerAddrs":{},"brokerName":"x","cluster":"c"}}'


async def test_write_permission_is_wiped_and_added(station: Station) -> None:
    station.register()
    assert station.good(RequestCode.WIPE_WRITE_PERM_OF_BROKER, brokerName="b").ext == {"wipeTopicCount": "2"}
    assert b'"perm":4' in station.good(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").body
    assert station.good(RequestCode.ADD_WRITE_PERM_OF_BROKER, brokerName="b").ext == {"addTopicCount": "2"}
    assert b'"perm":6' in station.good(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").body


async def test_lists_of_topics(station: Station) -> None:
    station.register("b", 0, ("T", "UU", "SSS", "BBBB"))
    lists = {
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: ["T", "UU", "SSS", "BBBB"],
        RequestCode.GET_TOPICS_BY_CLUSTER: ["T", "UU", "SSS", "BBBB"],
        RequestCode.GET_UNIT_TOPIC_LIST: ["UU", "BBBB"],
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: ["SSS", "BBBB"],
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: ["SSS"],
    }
    for code, topics in lists.items():
        assert orjson.loads(station.good(code, cluster="c").body) == {"topicList": topics}
    system = station.good(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).body
    assert orjson.loads(system) == {"brokerAddr": "b:0", "topicList": ["c", "b"]}


async def test_topics_come_and_go_one_by_one(station: Station) -> None:
    station.register()
    station.good(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="T")
    station.good(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="U", clusterName="c")
    assert finish_now(station.server.table.index.names()) == []
    body = b'{"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":1,"topicSysFlag":0,"writeQueueNums":1}]}'
    station.good(RequestCode.REGISTER_TOPIC_IN_NAMESRV, body, topic="X")
    assert finish_now(station.server.table.index.names()) == ["X"]


async def test_texts_are_kept_and_saved(station: Station) -> None:
    await station.save(RequestCode.PUT_KV_CONFIG, namespace="n", key="k", value="v")
    assert station.saved == [b'{"martletCrc":1944263822,"configTable":{"n":{"k":"v"}}}']
    assert station.good(RequestCode.GET_KV_CONFIG, namespace="n", key="k").ext == {"value": "v"}
    assert station.good(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="n").body == b'{"table":{"k":"v"}}'
    await station.save(RequestCode.DELETE_KV_CONFIG, namespace="n", key="k")
    await station.save(RequestCode.DELETE_KV_CONFIG, namespace="n", key="k")
    assert [orjson.loads(data)["configTable"] for data in station.saved[1:]] == [{"n": {}}]
    assert station.ask(RequestCode.GET_KV_CONFIG, namespace="n", key="k").code == ResponseCode.QUERY_NOT_FOUND
    assert station.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="m").code == ResponseCode.QUERY_NOT_FOUND
    again = Station()
    again.server.kv.load(b'{"configTable":{"n":{"k":"v"}}}')
    assert again.good(RequestCode.GET_KV_CONFIG, namespace="n", key="k").ext == {"value": "v"}


async def test_text_that_cannot_be_saved_does_not_count() -> None:
    async def fail(data: bytes) -> None:
        raise OSError("disk full")

    server = NameServer(NameServerConfig(), fail)
    command = Command(RequestCode.PUT_KV_CONFIG, {"namespace": "n", "key": "k", "value": "v"})
    refused = decode_frame(await answer_when_saved(server, command))
    assert (refused.code, refused.remark) == (ResponseCode.SYSTEM_ERROR, "disk full")
    assert server.kv.get("n", "k") is None


async def test_changes_of_texts_at_once_are_all_kept() -> None:
    station = Station()
    server, saved = NameServer(NameServerConfig(), station._save), station.saved

    async def slow(data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        saved.append(data)

    server.kv = KVConfig(slow)
    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(server.kv.put, "n", f"k{number}", "v")
    assert len(server.kv.namespace("n") or {}) == 10
    assert len(orjson.loads(saved[-1])["configTable"]["n"]) == 10


async def test_brokers_and_clients_get_the_ordered_topics() -> None:
    station = Station(NameServerConfig(order_messages=True))
    await station.save(RequestCode.PUT_KV_CONFIG, namespace="ORDER_TOPIC_CONFIG", key="T", value="b:4")
    assert station.register().body == b'{"table":{"T":"b:4"}}'
    assert b'"orderTopicConf":"b:4"' in station.good(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").body
    assert b"orderTopicConf" not in station.good(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="U").body


async def test_only_switches_change_over_the_wire(station: Station) -> None:
    station.register()
    refused = station.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"listenPort=1\nenableTopicList=false\n")
    assert refused.code == ResponseCode.NO_PERMISSION
    station.good(RequestCode.UPDATE_NAMESRV_CONFIG, b"enableTopicList=false\n")
    lines = station.good(RequestCode.GET_NAMESRV_CONFIG).body.decode().splitlines()
    assert {"listenPort=9876", "bindAddress=127.0.0.1", "enableTopicList=false"} <= set(lines)
    assert station.ask(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="c").code == ResponseCode.SYSTEM_ERROR
    refused = station.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"enableTopicList=maybe")
    assert refused.code == ResponseCode.SYSTEM_ERROR


async def test_zone_narrows_the_route_to_near_brokers(station: Station) -> None:
    station.register("a", __ZONE_NAME="z1")
    station.register("b", __ZONE_NAME="z2")
    station.register("slave", 1, enableActingMaster="false")
    ext = {"topic": "T", "__ZONE_MODE": "true", "__ZONE_NAME": "z1"}
    route = orjson.loads(station.good(RequestCode.GET_ROUTEINFO_BY_TOPIC, **ext).body)
    assert [(group["brokerName"], group.get("zoneName")) for group in route["brokerDatas"]] == [
        ("a", "z1"),
        ("slave", None),
    ]
    assert [queues["brokerName"] for queues in route["queueDatas"]] == ["a", "slave"]


async def test_unknown_code_and_missing_fields(station: Station) -> None:
    refused = station.ask(10)
    assert (refused.code, refused.remark) == (3, " request type 10 not supported")
    for code in REQUESTS:
        assert station.ask(code).code in (ResponseCode.SUCCESS, ResponseCode.SYSTEM_ERROR)


async def test_silent_brokers_expire(autojump_clock: object) -> None:

    station = Station()
    closed: list[str] = []

    class Line:
        def close(self, reason: str) -> None:
            closed.append(reason)

    fields = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0", "haServerAddr": "h"}
    command = Command(RequestCode.REGISTER_BROKER, fields, registration_body("T", "U"), version=NEW)
    finish_now(answer(station.server, Line(), command))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(station.server.scan)
        await trio.sleep(119)
        assert finish_now(station.server.table.index.names()) == ["T", "U"]
        await trio.sleep(7)
        assert finish_now(station.server.table.index.names()) == []
        assert closed == ["its broker was silent for too long"]
        nursery.cancel_scope.cancel()
