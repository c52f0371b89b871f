"""Authorizers that see the whole question, and answer with a verdict."""

from collections.abc import Collection
from ipaddress import ip_network

import pytest
from tests.delivery.pushing import broker_in_memory

from martlet.access.networks import AddressClasses
from martlet.broker import Broker
from martlet.contracts import AccessEvent, Action, Identity, LoginOrigin, Network, Question, Verdict
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.plugins.loader import guarded_authorizer

ANN = Identity("ann", ("staff",))
HERE = LoginOrigin("10.1.2.3", "mqtt")
ALLOWED = Verdict(allowed=True)


class Judge:
    """An authorizer whose verdicts a test sets; it keeps the questions."""

    def __init__(self, *networks: str) -> None:
        self.questions: list[Question] = []
        self.verdicts: dict[tuple[Action, str], Verdict | None] = {}
        self.default: Verdict | None = ALLOWED
        self.networks: Collection[Network] = [ip_network(each) for each in networks]

    def decide(self, question: Question) -> Verdict | None:
        self.questions.append(question)
        return self.verdicts.get((question.action, question.name), self.default)


def judged(broker: Broker, *networks: str) -> Judge:
    judge = Judge(*networks)
    broker.authorizers = (judge,)
    return judge


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("t", [("topic", "t")]),
        ("%RETRY%g", [("group", "g")]),
        ("", [("cluster", "")]),
        ("t/a/b", [("topic", "t"), ("name", "t/a/b")]),
        ("$share/mqtt/g/a/#", [("shared", ""), ("shared", "mqtt/g/a/#")]),
    ],
)
async def test_a_question_has_the_kind_and_the_name_of_the_resource(name: str, asked: list[tuple[str, str]]) -> None:
    async with broker_in_memory() as broker:
        judge = judged(broker)
        broker.gate(ANN, HERE).check("subscribe", name)
        assert [(each.kind, each.name) for each in judge.questions] == asked
        for each in judge.questions:
            assert (each.identity, each.action, each.address) == (ANN, "subscribe", "10.1.2.3")


async def test_a_refusal_has_the_reason_and_not_the_rule() -> None:
    async with broker_in_memory() as broker:
        judged(broker).verdicts["publish", "t"] = Verdict(allowed=False, rule="rule 7", reason="it is closed at night")
        with pytest.raises(Refused) as caught:
            broker.gate(ANN).check("publish", "t")
        assert (caught.value.reason, str(caught.value)) == (
            Reason.NO_PERMISSION,
            "'ann' may not publish to topic[t]; it is closed at night",
        )


async def test_one_of_several_actions_is_enough_and_the_first_is_named() -> None:
    async with broker_in_memory() as broker:
        judge, gate = judged(broker), broker.gate(ANN)
        judge.verdicts = {("get", "t"): Verdict(allowed=False), ("subscribe", "t"): ALLOWED}
        gate.queries.topic("t")
        judge.verdicts["subscribe", "t"] = Verdict(allowed=False)
        broker.rules.changed()
        with pytest.raises(Refused, match=r"may not get topic\[t\]"):
            gate.queries.topic("t")
        assert broker.rules.denied == 1


@pytest.mark.parametrize("exists", [False, True])
async def test_a_change_asks_for_create_or_where_it_exists_update_and_refuses_in_the_same_words(exists: bool) -> None:
    async with broker_in_memory() as broker:
        judge, admin = judged(broker), broker.gate(ANN).admin
        if exists:
            broker.topics.ensure("t", 1)
            broker.groups.ensure("g")
        judge.default, judge.verdicts = Verdict(allowed=False), {("update", "t"): ALLOWED, ("update", "g"): ALLOWED}
        for attempt, what in (lambda: admin.topic("t"), "topic"), (lambda: admin.group("g"), "consumer group"):
            if exists:
                attempt()
                continue
            with pytest.raises(Refused, match=rf"may not create {what}\["):
                attempt()
        judge.verdicts.clear()
        broker.rules.changed()
        for attempt, what in (lambda: admin.topic("t"), "topic"), (lambda: admin.group("g"), "consumer group"):
            with pytest.raises(Refused, match=rf"may not create {what}\["):
                attempt()


async def test_deletion_is_an_action_of_its_own() -> None:
    async with broker_in_memory() as broker:
        judge, admin = judged(broker), broker.gate(ANN).admin
        judge.verdicts = {("delete", "t"): Verdict(allowed=False), ("delete", "g"): Verdict(allowed=False)}
        admin.topic("t")
        admin.group("g")
        for attempt in (lambda: admin.topic_deletion("t"), lambda: admin.group_deletion("g")):
            with pytest.raises(Refused, match="may not delete"):
                attempt()


async def test_addresses_of_the_same_networks_share_verdicts() -> None:
    async with broker_in_memory() as broker:
        judge = judged(broker, "10.0.0.0/8", "10.1.0.0/16")
        gates = []
        for address in ("10.1.2.3", "10.1.9.9", "::ffff:10.1.0.1", "10.2.0.1", "192.168.0.1", "172.16.0.1", ""):
            gate = broker.gate(ANN, LoginOrigin(address, "mqtt"))
            gate.check("subscribe", "t")
            gates.append(gate)
        assert [each.address for each in judge.questions] == ["10.1.2.3", "10.2.0.1", "192.168.0.1", ""]
        judge.networks = [ip_network("10.1.9.9/32")]
        broker.rules.changed()
        judge.questions.clear()
        for gate in gates:
            gate.check("subscribe", "t")
        assert [each.address for each in judge.questions] == ["10.1.2.3", "10.1.9.9", ""]


def test_a_class_of_addresses_is_the_set_of_networks_that_contain_them() -> None:
    classes = AddressClasses([ip_network("10.0.0.0/8"), ip_network("2001:db8::/32"), ip_network("0.0.0.0/0")])
    assert classes.of("10.0.0.1") == classes.of("10.255.0.1") != classes.of("11.0.0.1")
    assert classes.of("2001:db8::1") == classes.of("2001:db8:ffff::1") != classes.of("2001:db9::1")
    assert classes.of("fe80::1%eth0") == classes.of("2001:db9::1")
    assert classes.of("no address") == classes.of("") == ()
    assert AddressClasses([]).of("10.0.0.1") == ()


async def test_what_is_only_observed_is_done_and_told_each_time() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        judge, told = judged(broker), list[AccessEvent]()
        broker.rules.listeners.append(told.append)
        observed = judge.default = Verdict(allowed=True, rule="none", observed=True)
        gate = broker.gate(ANN, HERE)
        for _ in range(3):
            gate.publish(Message("t", b"x"))
            gate.consume("G", "t")
        assert [(each.question.action, each.question.name, each.verdict, each.protocol) for each in told] == [
            ("publish", "t", observed, "mqtt"),
            ("subscribe", "G", observed, "mqtt"),
            ("subscribe", "t", observed, "mqtt"),
        ] * 3
        assert len(judge.questions) == 3
        assert (broker.rules.denied, dict(gate.publishable)) == (0, {})


async def test_each_refusal_is_told_with_its_rule() -> None:
    async with broker_in_memory() as broker:
        judge, told = judged(broker), list[AccessEvent]()
        broker.rules.listeners.append(told.append)
        judge.default = Verdict(allowed=False, rule="rule 7")
        gate = broker.gate(ANN, HERE)
        for _ in range(2):
            with pytest.raises(Refused):
                gate.publish(Message("t", b"x"))
        assert [(each.question.name, each.verdict.rule) for each in told] == [("t", "rule 7")] * 2
        assert (len(judge.questions), broker.rules.denied) == (1, 2)


@pytest.mark.parametrize("answer", [True, "yes", 1])
async def test_what_is_no_verdict_refuses_and_names_the_plugin(answer: object) -> None:
    async with broker_in_memory() as broker:
        judge = Judge("10.0.0.0/8")
        judge.default = answer  # type: ignore[assignment]
        broker.authorizers = (guarded_authorizer("toys", judge),)
        with pytest.raises(Refused, match="plugin 'toys' failed in its authorizer; TypeError: it returned"):
            broker.gate(ANN, HERE).check("publish", "t")


async def test_a_guarded_authorizer_names_the_networks_of_its_rules() -> None:
    async with broker_in_memory() as broker:
        judge = Judge("10.0.0.0/8")
        broker.authorizers = (guarded_authorizer("toys", judge),)
        for address in ("10.0.0.1", "11.0.0.1"):
            broker.gate(ANN, LoginOrigin(address)).check("publish", "t")
        assert len(judge.questions) == 2
