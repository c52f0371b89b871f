"""What each request to the name server asks the authorizers, and that nothing happens when they say no."""

from collections.abc import Mapping
from typing import Final

import orjson
import pytest

from martlet.contracts import Network, Question, Verdict
from martlet.errors import Reason, Refused
from martlet.runtime.steps import finish_now
from martlet_remoting.nameserver.requests import REQUESTS, SAVED
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode

from .conftest import Harness
from .nameserver_talk import BROKER, REGISTRATION, NameServerClient, open_nameserver, registration_body

Asked = tuple[str, str, str]  # action, kind, name

UPDATE: Asked = ("update", "cluster", "")
GET: Asked = ("get", "cluster", "")
LIST: Asked = ("list", "cluster", "")
TEXT: Mapping[str, object] = {"namespace": "n", "key": "k", "value": "w"}
NEW: Mapping[str, object] = {**REGISTRATION, "brokerName": "new", "brokerAddr": "new:0"}
QUEUES: Final = {"queueDatas": [{"brokerName": "b", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}]}
VERSION: Final = {"counter": 3, "stateVersion": 0, "timestamp": 5}

# code -> header, body, what is asked; if there are several questions, one yes is enough
ROWS: Mapping[int, tuple[Mapping[str, object], bytes, list[Asked]]] = {
    RequestCode.PUT_KV_CONFIG: (TEXT, b"", [UPDATE]),
    RequestCode.GET_KV_CONFIG: (TEXT, b"", [GET]),
    RequestCode.DELETE_KV_CONFIG: (TEXT, b"", [UPDATE]),
    RequestCode.REGISTER_BROKER: (NEW, registration_body("T", "W"), [UPDATE]),
    RequestCode.UNREGISTER_BROKER: (BROKER, b"", [UPDATE]),
    RequestCode.GET_ROUTEINFO_BY_TOPIC: (
        {"topic": "T"},
        b"",
        [("publish", "topic", "T"), ("subscribe", "topic", "T"), ("get", "topic", "T")],
    ),
    RequestCode.GET_BROKER_CLUSTER_INFO: ({}, b"", [GET]),
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: (BROKER, b"", [UPDATE]),
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: ({}, b"", [LIST]),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: ({"topic": "T"}, b"", [UPDATE, ("delete", "topic", "T")]),
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: ({"topic": "N"}, orjson.dumps(QUEUES), [UPDATE]),
    RequestCode.GET_KVLIST_BY_NAMESPACE: (TEXT, b"", [GET]),
    RequestCode.GET_TOPICS_BY_CLUSTER: ({"cluster": "c"}, b"", [LIST]),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: ({}, b"", [LIST]),
    RequestCode.GET_UNIT_TOPIC_LIST: ({}, b"", [LIST]),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: ({}, b"", [LIST]),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: ({}, b"", [LIST]),
    RequestCode.UPDATE_NAMESRV_CONFIG: ({}, b"enableTopicList=false", [UPDATE]),
    RequestCode.GET_NAMESRV_CONFIG: ({}, b"", [GET]),
    RequestCode.QUERY_DATA_VERSION: (BROKER, orjson.dumps(VERSION), [UPDATE]),
    RequestCode.ADD_WRITE_PERM_OF_BROKER: ({"brokerName": "r"}, b"", [UPDATE]),
    RequestCode.GET_BROKER_MEMBER_GROUP: (BROKER, b"", [GET]),
    RequestCode.BROKER_HEARTBEAT: (BROKER, b"", [UPDATE]),
}
CASES = [(code, ext, body, asked) for code, (ext, body, asked) in ROWS.items()]
IDS = [str(case[0]) for case in CASES]
# These change what the name server knows.
CHANGES = [code for code, (_, _, asked) in ROWS.items() if UPDATE in asked]


class Judge:
    """An authorizer that allows only what the test sets, and records the questions."""

    networks: tuple[Network, ...] = ()

    def __init__(self, *allowed: Asked) -> None:
        self.allowed = allowed
        self.asked: list[Asked] = []
        self.origins: set[tuple[str, str]] = set()

    def decide(self, question: Question) -> Verdict:
        asked = question.action, question.kind, question.name
        self.asked.append(asked)
        self.origins.add((question.identity.name, question.address))
        return Verdict(asked in self.allowed)


async def opened(harness: Harness) -> tuple[NameServer, NameServerClient]:
    """A name server with two brokers; one has no permission to write."""
    server = await open_nameserver(harness.broker, "T", "U", "%RETRY%G")
    client = NameServerClient(server, harness.broker, "10.0.0.7")
    ext = {**REGISTRATION, "brokerName": "r", "brokerAddr": "r:0"}
    assert (await client.register("T", "V", ext=ext)).code == 0
    assert (await client.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "r"})).code == 0
    return server, client


def knowledge(server: NameServer) -> object:
    """All that requests can change."""
    names = finish_now(server.table.index.names())
    live = [server.table.live.get("c", f"{name}:0") for name in ("b", "r", "new")]
    return (
        {name: server.table.route(name) for name in names},
        [each and each.seen for each in live],
        server.kv.namespace("n"),
        server.properties(),
        len(server.clients),
        len(server.tools),
    )


def test_every_request_that_is_served_is_in_the_table() -> None:
    assert ROWS.keys() == REQUESTS.keys() | SAVED.keys()


@pytest.mark.parametrize(("code", "ext", "body", "wanted"), CASES, ids=IDS)
async def test_authorizers_are_asked_in_order_until_one_question_is_answered_yes(
    harness: Harness, code: int, ext: Mapping[str, object], body: bytes, wanted: list[Asked]
) -> None:
    server, client = await opened(harness)
    before = knowledge(server)
    for place, only in enumerate(wanted):
        judge = Judge(only)
        harness.broker.authorizers = (judge,)
        assert (await client.ask(code, ext, body)).code == ResponseCode.SUCCESS
        assert list(dict.fromkeys(judge.asked)) == wanted[: place + 1]
        assert judge.origins == {("", "10.0.0.7")}
    assert (code in CHANGES) <= (knowledge(server) != before)


@pytest.mark.parametrize(("code", "ext", "body", "wanted"), CASES, ids=IDS)
async def test_without_the_permission_a_request_has_no_effect(
    harness: Harness, code: int, ext: Mapping[str, object], body: bytes, wanted: list[Asked]
) -> None:
    server, client = await opened(harness)
    before = knowledge(server)
    judge = Judge(("subscribe", "topic", "U"), ("update", "topic", "T"), ("delete", "topic", "U"))
    harness.broker.authorizers = (judge,)
    answer = await client.ask(code, ext, body)
    assert set(judge.asked) == set(wanted)
    if code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    else:
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "'' may not " in str(answer.remark)
    assert (answer.body, answer.ext) == (b"", {})
    assert await client.send(code, ext, body, flag=FLAG_ONEWAY) == []
    assert knowledge(server) == before


@pytest.mark.parametrize(("code", "ext", "body", "wanted"), CASES, ids=IDS)
async def test_without_authorizers_everything_is_allowed(
    harness: Harness, code: int, ext: Mapping[str, object], body: bytes, wanted: list[Asked]
) -> None:
    _, client = await opened(harness)
    assert (await client.ask(code, ext, body)).code == ResponseCode.SUCCESS


async def test_other_codes_are_unknown_to_everybody(harness: Harness) -> None:
    _, client = await opened(harness)
    harness.broker.authorizers = (Judge(),)
    answer = await client.ask(RequestCode.SEND_MESSAGE, {})
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


# routes

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


@pytest.mark.parametrize(("there", "absent"), [("T", "X"), ("%RETRY%G", "%RETRY%H"), ("%LMQ%T", "X")])
async def test_a_refused_route_is_that_of_a_missing_topic(harness: Harness, there: str, absent: str) -> None:
    """Byte for byte: a user who may not use a topic does not learn whether it exists."""
    server, client = await opened(harness)
    assert (await client.ask(ROUTE, {"topic": there})).code == 0
    harness.broker.authorizers = (Judge(("publish", "topic", absent), ("publish", "group", absent[7:])),)
    counted = server.table.statistics()
    refused, missing = await client.ask(ROUTE, {"topic": there}), await client.ask(ROUTE, {"topic": absent})
    assert refused.code == missing.code == ResponseCode.TOPIC_NOT_EXIST
    assert f"the topic: {there}; " in str(refused.remark)
    assert str(refused.remark).replace(there, absent) == missing.remark
    assert (refused.body, refused.ext, refused.version) == (missing.body, missing.ext, missing.version)
    assert server.table.statistics() == counted


async def test_a_refused_route_is_not_looked_up(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its time does not tell whether the topic exists."""
    server, client = await opened(harness)
    harness.broker.authorizers = (Judge(),)

    def look_up(*_: object) -> None:
        raise AssertionError("the route was looked up")

    server.planned = look_up
    monkeypatch.setattr(type(server.table), "route", look_up)
    for topic in "T", "X", "%RETRY%G", "%RETRY%H":
        assert (await client.ask(ROUTE, {"topic": topic})).code == ResponseCode.TOPIC_NOT_EXIST


async def test_the_route_of_a_retry_topic_is_for_members_of_its_group(harness: Harness) -> None:
    _, client = await opened(harness)
    judge = Judge(("subscribe", "group", "G"))
    harness.broker.authorizers = (judge,)
    assert (await client.ask(ROUTE, {"topic": "%RETRY%G"})).code == 0
    assert (await client.ask(ROUTE, {"topic": "%RETRY%H"})).code == ResponseCode.TOPIC_NOT_EXIST


async def test_the_remark_mentions_permissions_only_if_there_are_some(harness: Harness) -> None:
    _, client = await opened(harness)
    text = "No topic route info in name server for the topic: X; create the topic"
    answer = await client.ask(ROUTE, {"topic": "X"})
    assert answer.remark == f"{text}, or check that its broker is registered here"
    harness.broker.authorizers = (Judge(),)
    answer = await client.ask(ROUTE, {"topic": "X"})
    assert answer.remark == f"{text}, check that its broker is registered here, or that you may use it"


async def test_an_authorizer_that_fails_refuses_the_route(harness: Harness) -> None:
    _, client = await opened(harness)

    def fail(*_: object) -> bool:
        raise Refused(Reason.UNAVAILABLE, "plugin 'p' failed in its authorizer")

    harness.broker.authorizers = (fail,)
    for topic in "T", "X":
        answer = await client.ask(ROUTE, {"topic": topic})
        assert (answer.code, answer.remark) == (
            ResponseCode.SERVICE_NOT_AVAILABLE,
            "plugin 'p' failed in its authorizer",
        )


async def test_listeners_hear_of_refusals_but_not_of_each_heartbeat(harness: Harness) -> None:
    _, client = await opened(harness)
    heard: list[tuple[str, bool, str]] = []
    harness.broker.rules.listeners.append(
        lambda event: heard.append((event.question.action, event.verdict.allowed, event.protocol))
    )
    harness.broker.authorizers = (Judge(UPDATE),)
    for code in RequestCode.BROKER_HEARTBEAT, RequestCode.QUERY_DATA_VERSION, RequestCode.REGISTER_BROKER:
        ext, body, _ = ROWS[code]
        assert (await client.ask(code, ext, body)).code == 0
    assert heard == []
    assert (await client.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, BROKER)).code == 0
    assert (await client.ask(ROUTE, {"topic": "T"})).code == ResponseCode.TOPIC_NOT_EXIST
    assert heard == [("update", True, "nameserver"), ("publish", False, "nameserver")]


async def test_a_change_of_the_rules_counts_at_once(harness: Harness) -> None:
    _, client = await opened(harness)
    judge = Judge(("get", "topic", "T"))
    harness.broker.authorizers = (judge,)
    assert (await client.ask(ROUTE, {"topic": "T"})).code == 0
    judge.allowed = ()
    harness.broker.rules.changed()
    assert (await client.ask(ROUTE, {"topic": "T"})).code == ResponseCode.TOPIC_NOT_EXIST
