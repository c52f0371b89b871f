"""The decisions of the rules, and of rules that are only observed."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.acl.brokers import PROPERTIES, AclBroker, acl_broker, signed, write_files
from tests.remoting.conftest import send_ext

from martlet.contracts import Identity, Question, UserChange
from martlet.errors import Refused
from martlet_acl.authorizer import RuleAuthorizer
from martlet_acl.observations import OBSERVATIONS_MAX, Observation
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

ALICE = "password of alice"
KEY = "secret of alice"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AclBroker]:
    users = {"alice": {}, "bob": {"disabled": True}}
    rules = {
        "user:alice": [
            "allow all on topic:orders",
            "allow publish on name:mqtt/alice/#",
            "deny all on shared:*",
            "allow all on shared:stomp/queue/b",
        ],
        "everybody": ["deny all on topic:closed", "allow all on name:closed/a"],
    }
    write_files(tmp_path, users, rules, observe=True)
    async with acl_broker(tmp_path) as found:
        found.broker.topics.ensure("orders", 1)
        found.broker.topics.ensure("other", 1)
        yield found


def report(broker: AclBroker) -> list[tuple[str, str, str, str, int]]:
    found = broker.plugin.observations.report()
    return [(each.subject, each.action, each.kind, each.name, each.count) for each in reversed(found)]


async def test_what_would_be_refused_is_allowed_and_counted(broker: AclBroker) -> None:
    talk = broker.remoting()
    for topic in ("orders", "other", "other"):
        assert (await broker.remoting_send(talk, topic, "alice", KEY)).code == ResponseCode.SUCCESS
    assert (await broker.remoting_send(broker.remoting(), "orders")).code == ResponseCode.SUCCESS
    found = report(broker)
    assert [each[:4] for each in found] == [("alice", "publish", "topic", "other"), ("", "publish", "topic", "orders")]
    assert [each[4] for each in found] == [2, 1]
    other = broker.plugin.observations.report()[1]
    assert (other.reason, other.rule) == ("no rule allows it", "")
    assert (other.address, other.protocol) == ("127.0.0.1", "remoting")
    assert 0 < other.first_ms <= other.last_ms
    assert broker.plugin.statistics()["observed"] == other.count + found[1][4]


async def test_each_message_counts_once_however_it_is_sent(broker: AclBroker) -> None:
    """Alone, in a run of sends, in a batch, to a new topic, as a reply, and by STOMP and MQTT."""
    talk = broker.remoting()
    send, batch = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE
    members = encode_batch([BatchMessage(b"a"), BatchMessage(b"b")])
    requests = [(send, send_ext("other", 0, PROPERTIES), b"x")] * 6
    requests += [(batch, send_ext("other", m="true"), members), (send, send_ext("new"), b"x")]
    run = [
        Command(code, signed(ext, body, "alice", KEY), body, number)
        for number, (code, ext, body) in enumerate(requests)
    ]
    await talk.send_command(*run)
    assert {(await talk.receive()).code for _ in run} == {ResponseCode.SUCCESS}
    reply = signed(send_ext("replies", 0, PROPERTIES), b"x", "alice", KEY)
    answer = await talk.ask(RequestCode.SEND_REPLY_MESSAGE_V2, reply, b"x")
    assert answer.remark == "push reply message fail, channel of <> not found."
    mqtt = await broker.mqtt_login("alice", ALICE.encode())
    assert mqtt is not None
    assert await broker.mqtt_publish(mqtt, "bob/door")
    found = await broker.stomp_login("alice", ALICE)
    assert found is not None
    await found[0].publish("/queue/other", b"x", b"y")
    counts = {each[3]: each[4] for each in report(broker)}
    assert counts == {"other": 10, "new": 1, "replies": 1, "mqtt/bob/door": 1}


async def test_logins_that_would_be_refused_are_counted(broker: AclBroker) -> None:
    for user, password in (
        ("alice", "?"),
        ("bob", "password of bob"),
        ("carol", "?"),
        ("alice", "?"),
        ("alice", ALICE),
    ):
        assert await broker.mqtt_login(user, password.encode()) is not None
    talk = broker.remoting()
    for key, secret in (("alice", "?"), ("eve", "?"), ("alice", KEY)):
        assert (await broker.remoting_send(talk, "orders", key, secret)).code == ResponseCode.SUCCESS
    logins = [each for each in report(broker) if each[1] == "login"]
    assert logins == [
        ("bob", "login", "", "password", 1),
        ("carol", "login", "", "password", 1),
        ("alice", "login", "", "password", 2),
        ("alice", "login", "", "signature", 1),
        ("eve", "login", "", "signature", 1),
    ]
    reasons = {each.subject: each.reason for each in broker.plugin.observations.report() if each.name == "password"}
    assert reasons["bob"] == "user 'bob' is disabled"
    assert reasons["carol"] == "user 'carol' or the password is wrong"


async def test_a_password_that_was_observed_is_not_proved_when_rules_are_enforced(broker: AclBroker) -> None:
    assert await broker.mqtt_login("alice", b"wrong") is not None
    await broker.administration.set_observing(observe=False)
    assert await broker.mqtt_login("alice", b"wrong") is None
    assert await broker.mqtt_login("alice", ALICE.encode()) is not None
    talk = broker.remoting()
    assert (await broker.remoting_send(talk, "orders", "alice", "?")).code == ResponseCode.NO_PERMISSION
    assert (await broker.remoting_send(talk, "other", "alice", KEY)).code == ResponseCode.NO_PERMISSION
    assert (await broker.remoting_send(talk, "orders", "alice", KEY)).code == ResponseCode.SUCCESS


async def test_to_observe_begins_at_once(broker: AclBroker) -> None:
    await broker.administration.set_observing(observe=False)
    talk = broker.remoting()
    assert (await broker.remoting_send(talk, "other", "alice", KEY)).code == ResponseCode.NO_PERMISSION
    await broker.administration.set_observing(observe=True)
    assert (await broker.remoting_send(talk, "other", "alice", KEY)).code == ResponseCode.SUCCESS


@pytest.mark.parametrize(
    ("name", "kind", "observed"),
    [
        ("orders", "topic", False),
        ("other", "topic", True),
        ("mqtt/alice/a", "name", False),
        ("mqtt/bob", "name", True),
        ("orders/a", "name", False),
        ("closed/a", "name", True),  # the topic is denied, so the name is not asked about
        ("stomp/queue/a", "shared", True),
        ("stomp/queue/b", "shared", False),  # the rule that matches fewer groups decides
        ("", "cluster", True),
    ],
)
async def test_observed_verdicts_are_those_that_would_be_enforced(
    broker: AclBroker, name: str, kind: str, observed: bool
) -> None:
    authorizer = RuleAuthorizer(lambda: broker.state)
    question = Question(Identity("alice"), "publish", kind, name)  # type: ignore[arg-type]
    verdict = authorizer.decide(question)
    assert verdict is not None
    assert (verdict.allowed, verdict.observed) == (True, observed)
    gate = broker.broker.gate(Identity("alice"))
    asked = {"cluster": "", "shared": f"$share/{name}"}.get(kind, name)
    assert gate.allows("publish", asked)
    await broker.administration.set_observing(observe=False)
    assert gate.allows("publish", asked) is not observed


async def test_the_report_is_bounded(broker: AclBroker) -> None:
    observations = broker.plugin.observations
    for number in range(OBSERVATIONS_MAX + 10):
        observations.note_login(f"user{number}", "password", "wrong")
    observations.note_login("x" * 10_000, "y" * 10_000, "wrong")
    found = observations.report()
    assert (len(found), observations.dropped) == (OBSERVATIONS_MAX, 11)
    assert isinstance(found[0], Observation)
    assert len(found[0].subject) == len(found[0].name) == 1024
    observations.clear()
    assert (observations.report(), observations.count) == ([], 0)


async def test_rules_apply_to_connections_at_once(broker: AclBroker) -> None:
    await broker.administration.set_observing(observe=False)
    gate = broker.broker.gate(Identity("alice"))
    gate.check("publish", "orders")
    await broker.administration.delete_rules("user:alice", None, "topic:orders", None)
    with pytest.raises(Refused, match="'alice' may not publish to topic"):
        gate.check("publish", "orders")
    await broker.administration.update_user("alice", UserChange(administrator=True), None)
    gate.check("publish", "orders")
