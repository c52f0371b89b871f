"""The gate asks before anything happens, asks once, and asks again when the rules change."""

import re
from collections.abc import Iterator
from functools import partial

import pytest
import trio
from tests.delivery.pushing import LINES, broker_in_memory

from martlet.access import ANONYMOUS, Gate, publish_together
from martlet.broker import Broker
from martlet.contracts import (
    Certificate,
    Credentials,
    Identity,
    LoginOrigin,
    Nobody,
    Password,
    PasswordCheck,
    Router,
    SignedRequest,
    Stage,
)
from martlet.delivery.subscriptions import from_earliest
from martlet.errors import LocalProtocolError, Reason, Refused
from martlet.groups.membership import Membership
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import Message
from martlet.plugins.loader import guarded_authenticator, guarded_authorizer
from martlet.store.append.items import AppendItem
from martlet.store.format.light import light_topics
from martlet.store.format.notes import OWN_PREFIX
from martlet.store.queues.queues import Queue
from martlet.tables.topics import BROKER_TOPICS, EVENT_TOPIC
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import drain

ANN = Identity("ann")


class Ledger:
    """An authorizer that allows what is not in *denied*, and notes what it was asked."""

    def __init__(self, *denied: tuple[str, str]) -> None:
        self.denied = set(denied)
        self.asked: list[tuple[str, str, str]] = []

    def __call__(self, identity: Identity, action: str, name: str) -> bool:
        self.asked.append((identity.name, action, name))
        return (action, name) not in self.denied


def guarded(broker: Broker, *denied: tuple[str, str]) -> tuple[Gate, Ledger]:
    ledger = Ledger(*denied)
    broker.authorizers = (ledger,)
    broker.topics.ensure("t", 1)
    return broker.gate(ANN), ledger


def tuple_for(topic: str) -> AppendItem:
    return (Queue(topic, 0), b"x", b"", 0, 0, 0, 0, bytes(8), 0, 0)


def attempts(gate: Gate, topic: str = "t") -> Iterator[object]:
    """Everything that messages pass through, each a call."""
    peer = RecordingPeer()
    yield lambda: gate.publish(Message(topic, b"x"))
    yield lambda: gate.publish_all([Message(topic, b"x")], atomic=True)
    yield lambda: gate.publish_all([Message(topic, b"x")]).placed(0)
    yield lambda: gate.publish_all([tuple_for(topic)], atomic=True)
    yield lambda: gate.publish_all([tuple_for(topic)]).placed(0)
    yield lambda: gate.subscribe(peer, topic, LINES)
    yield lambda: gate.join(peer, topic, "G", LINES, Membership(lease_s=1))
    yield lambda: gate.consume("G", topic)
    yield lambda: gate.find_topic(topic, "subscribe", 1)
    yield lambda: gate.find_topic(topic, "publish", 1)


def refused(call: object) -> str:
    assert callable(call)
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.reason is Reason.NO_PERMISSION
    return str(caught.value)


async def test_each_decision_is_asked_for_once_until_the_rules_change() -> None:
    async with broker_in_memory() as broker:
        gate, ledger = guarded(broker)
        generation = broker.rules.generation
        for _ in range(3):
            gate.publish(Message("t", b"x"))
            gate.publish_all([Message("t", b"x")] * 2)
            gate.queries.topic("t")
            broker.gate(Identity("ann")).queries.topic("t")  # another connection of the same client
        assert ledger.asked == [("ann", "publish", "t"), ("ann", "read", "t")]
        ledger.denied = {("publish", "t"), ("read", "t")}
        gate.publish(Message("t", b"x"))
        broker.rules.changed()
        assert broker.rules.generation == generation + 1
        refused(lambda: gate.publish(Message("t", b"x")))
        refused(lambda: gate.queries.topic("t"))


async def test_queues_for_a_run_are_given_once_their_topic_was_allowed() -> None:
    async with broker_in_memory() as broker:
        gate, ledger = guarded(broker)
        assert gate.find_queue("t", 0) is None
        gate.check_publish("t")
        queue = gate.find_queue("t", 0)
        assert queue is not None
        assert gate.find_queue("t", 1) is gate.find_queue("t", -1) is None
        result = gate.publish_all([(queue, b"x", b"", 0, 0, 0, 0, bytes(8), 0, 0)])
        assert result.offsets == [0]
        assert ledger.asked == [("ann", "publish", "t")]
        ledger.denied.add(("publish", "t"))
        broker.rules.changed()
        assert gate.find_queue("t", 0) is None


async def test_no_run_passes_by_the_stages_or_the_limit_of_the_broker() -> None:
    async with broker_in_memory() as broker:
        gate, _ = guarded(broker)
        gate.check_publish("t")
        queue = gate.find_queue("t", 0)
        assert queue is not None
        body = bytes(broker.config.message_bytes_max + 1)
        with pytest.raises(Refused, match="message body is"):
            gate.publish_all([(queue, body, b"", 0, 0, 0, 0, bytes(8), 0, 0)]).placed(0)
        odd = [(queue, b"x", properties, 0, 0, 0, 0, bytes(8), 0, 0) for properties in (b"", b"\x00")]
        assert list(gate.publish_all(odd).refused) == [1]
        with pytest.raises(Refused, match=r"U\+0000"):
            gate.publish_all(odd, atomic=True)
        assert queue.next_offset == 1
        broker.set_stages([("test", Stage(lambda message: message))])
        assert gate.find_queue("t", 0) is None
        with pytest.raises(LocalProtocolError, match="a stage wants every message"):
            gate.publish_all([(queue, b"x", b"", 0, 0, 0, 0, bytes(8), 0, 0)])


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1), (3, 1), (5, 4, 1)])
@pytest.mark.parametrize("denied", [(), ("ann",), ("bob", "eve")])
async def test_messages_of_several_gates_are_stored_together_as_if_each_had_stored_its_own(
    sizes: tuple[int, ...], denied: tuple[str, ...]
) -> None:
    results = []
    for together in (False, True):
        async with broker_in_memory() as broker:
            broker.topics.ensure("t", 1)
            broker.authorizers = (lambda identity, action, name: identity.name not in denied,)
            parts: list[tuple[Gate, list[AppendItem | Message]]] = []
            for number, (name, size) in enumerate(zip(("ann", "bob", "eve"), sizes, strict=False)):
                gate = broker.gate(Identity(name))
                if name not in denied:
                    gate.check_publish("t")
                queue = broker.store.queues.get("t", 0)
                items: list[AppendItem | Message] = [
                    (queue, b"%d.%d" % (number, i), b"", 0, 0, 0, 0, bytes(8), 0, 0) for i in range(size - 1)
                ]
                parts.append((gate, [*items, Message("t", b"%d.message" % number, queue_id=0)]))
            found = [publish_together(parts)] if together else [gate.publish_all(items) for gate, items in parts]
            places: list[object] = []
            for result in found:
                for index, offset in enumerate(result.offsets):
                    refused = result.refused.get(index)
                    places.append((offset, result.positions[index], result.ends[index], refused and str(refused)))
            broker.store.committer.commit()
            await broker.store.flusher.flush()
            results.append((places, drain(broker.store, queue)))
    alone, joined = results
    assert alone == joined
    assert len(alone[1]) == sum(
        size for name, size in zip(("ann", "bob", "eve"), sizes, strict=False) if name not in denied
    )


async def test_whoever_names_light_topics_must_be_allowed_to_publish_to_them() -> None:
    async with broker_in_memory() as broker:
        gate, ledger = guarded(broker, ("publish", "%LMQ%mine"))
        named = b"INNER_MULTI_DISPATCH\x01%LMQ%yours,%LMQ%mine\x02"
        gate.publish(Message("t", b"x", named))
        assert ledger.asked == [("ann", "publish", "t")], "without routers the property means nothing"
        broker.set_stages((), (("test", Router(lambda message: light_topics(message.properties))),))
        for attempt in (  # with the gate that is older than the routers
            lambda: gate.publish(Message("t", b"x", named)),
            lambda: gate.publish_all([Message("t", b"x", named)], atomic=True),
            lambda: gate.publish_all([Message("t", b"x"), Message("t", b"x", named)], atomic=True),
            lambda: gate.publish_all([Message("t", b"x", named)]).placed(0),
        ):
            assert "%LMQ%mine" in refused(attempt)
        outcomes = gate.publish_all([Message("t", b"x", named), Message("t", b"x")]).outcomes()
        assert [isinstance(each, Refused) for each in outcomes] == [True, False]
        assert broker.store.queues.light == 0
        gate.publish(Message("t", b"x", named.replace(b"mine", b"ours")))
        broker.store.committer.commit()
        assert drain(broker.store, broker.store.queue("%LMQ%ours", 0)) == [b"x"]
        broker.topics.ensure("%DLQ%G", 1)
        broker.groups.ensure("G")
        gate.give_back("G", Message("%DLQ%G", b"x", named))
        broker.store.committer.commit()
        assert broker.store.queues.light == 2


@pytest.mark.parametrize(("denied", "shown"), [([], True), (["t"], True), (["%LMQ%a"], True), (["t", "%LMQ%a"], False)])
async def test_a_record_is_shown_to_whoever_may_read_a_queue_that_has_it(denied: list[str], shown: bool) -> None:
    async with broker_in_memory() as broker:
        broker.set_stages((), (("test", Router(lambda message: light_topics(message.properties))),))
        broker.topics.ensure("t", 1)
        placed = broker.publish(Message("t", b"x", b"INNER_MULTI_DISPATCH\x01%LMQ%a\x02"))
        plain = broker.publish(Message("t", b"plain"))
        broker.store.committer.commit()
        gate, _ = guarded(broker, *(("read", name) for name in denied))
        if shown:
            assert await gate.queries.record_at(placed.position) is not None
        else:
            with pytest.raises(Refused, match="may not get the message"):
                await gate.queries.record_at(placed.position)
        if "t" in denied:
            with pytest.raises(Refused):
                await gate.queries.record_at(plain.position)


async def test_an_identity_does_not_get_the_decisions_of_another() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.authorizers = (lambda identity, action, name: identity.name == "ann",)
        broker.gate(ANN).publish(Message("t", b"x"))
        assert refused(lambda: broker.gate(ANONYMOUS).publish(Message("t", b"x"))) == "'' may not publish to topic[t]"


async def test_what_is_denied_happens_on_no_path() -> None:
    async with broker_in_memory() as broker:
        gate, _ = guarded(broker, ("read", "t"), ("publish", "t"))
        for attempt in attempts(gate):
            refused(attempt)
        [result] = gate.publish_all([Message("t", b"x")]).outcomes()
        assert isinstance(result, Refused)
        assert broker.store.appended == 0
        assert broker.subscriptions.statistics()["subscriptions"] == 0
        assert broker.groups.get("G") is None
        assert broker.statistics()["refused_by_authorizers"] == 11


async def test_without_an_opinion_of_any_authorizer_the_answer_is_no() -> None:
    async with broker_in_memory() as broker:
        gate = broker.gate(ANN)
        assert gate.allows("update", "")
        broker.authorizers = (lambda identity, action, name: None,)
        assert not gate.allows("update", "")


async def test_events_are_read_by_consumers_and_written_by_the_broker_only() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure(EVENT_TOPIC, 1)
        gate = broker.gate(ANN)
        assert gate.consume("__MONITOR_CONSUMER", EVENT_TOPIC).open_topic() is not None
        assert "only the broker writes it" in refused(lambda: gate.check_publish(EVENT_TOPIC))


@pytest.mark.parametrize("topic", sorted(BROKER_TOPICS - {EVENT_TOPIC}))
async def test_the_topics_of_the_broker_itself_are_closed(topic: str) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure(topic, 1)
        gate = broker.gate(ANN)
        for attempt in attempts(gate, topic):
            assert "is forbidden" in refused(attempt)
        [result] = gate.publish_all([Message(topic, b"x")]).outcomes()
        assert isinstance(result, Refused)
        assert broker.store.appended == 0
        # The broker itself writes there: a timer, or the half of a transaction.
        broker.publish(Message(topic, b"x"))
        assert broker.store.appended > 0


async def test_journals_are_closed() -> None:
    async with broker_in_memory() as broker:
        for attempt in attempts(broker.gate(ANN), f"{OWN_PREFIX}journal.mqtt"):
            assert "is forbidden" in refused(attempt)


async def test_a_subscription_is_asked_about_at_each_delivery() -> None:
    async with broker_in_memory() as broker:
        gate, ledger = guarded(broker)
        peer = RecordingPeer()
        reader = gate.subscribe(peer, "t", LINES, start=from_earliest, credit=9)
        member = gate.join(peer, "t", "G", LINES, Membership(lease_s=30, credit=9, start=from_earliest))
        ledger.denied = {("read", "t")}
        broker.rules.changed()
        refused(lambda: reader.collect(1000))
        refused(lambda: member.collect(1000))
        ledger.denied = {("read", "%RETRY%G")}
        broker.rules.changed()
        assert reader.collect(1000) == []
        assert refused(lambda: member.collect(1000)) == "'ann' may not subscribe to consumer group[G]"


@pytest.mark.parametrize("scope", ["", "/", "a/b", "stomp/"])
def test_a_scope_by_which_authorizers_could_confuse_two_groups_is_refused(scope: str) -> None:
    with pytest.raises(LocalProtocolError, match=re.escape(f"scope {scope!r} of a shared group")):
        GroupPolicy(scope)


@pytest.mark.parametrize("settled", [False, True])
async def test_a_shared_group_is_for_those_who_may_read_it_and_not_for_every_reader_of_the_topic(settled: bool) -> None:
    policy = GroupPolicy("stomp")

    def rules(identity: Identity, action: str, name: str) -> bool | None:
        return None if name == "$share" else name == "t" or name == f"$share/stomp/{identity.name}/jobs"

    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.authorizers = (rules,)
        ann, bob, peer = broker.gate(ANN), broker.gate(Identity("bob")), RecordingPeer()
        member = ann.join(peer, "t", "ann/jobs", LINES, Membership(lease_s=1), policy)
        assert ann.shared_group("t", "ann/jobs", policy) is member.group
        if settled:
            text = refused(lambda: bob.shared_group("t", "ann/jobs", policy))
        else:
            text = refused(lambda: bob.join(peer, "t", "ann/jobs", LINES, Membership(lease_s=1), policy))
        assert text == "'bob' may not subscribe to shared group[stomp/ann/jobs]"
        bob.join(peer, "t", "bob/jobs", LINES, Membership(lease_s=1), policy)
        refused(lambda: ann.join(peer, "t", "bob/jobs", LINES, Membership(lease_s=1), GroupPolicy("mqtt")))
        broker.authorizers = (lambda identity, action, name: not name.startswith("$share/"),)
        with pytest.raises(Refused):
            member.collect(1)


async def test_an_opinion_about_shared_groups_in_general_is_for_each_of_them() -> None:
    async with broker_in_memory() as broker:
        gate, ledger = guarded(broker)
        broker.authorizers = (lambda identity, action, name: None if "/" in name else ledger(identity, action, name),)
        gate.join(RecordingPeer(), "t", "any text", LINES, Membership(lease_s=1), GroupPolicy("stomp"))
        assert ledger.asked == [("ann", "read", "t"), ("ann", "read", "$share")]


async def test_a_message_given_back_goes_to_the_topics_of_its_group_alone() -> None:
    async with broker_in_memory() as broker:
        gate, ledger = guarded(broker, ("publish", "%RETRY%G"), ("publish", "%DLQ%G"))
        for name in ("%RETRY%G", "%DLQ%G"):
            broker.topics.ensure(name, 1)
            assert gate.give_back("G", Message(name, b"x")).queue_id == 0
        assert set(ledger.asked) == {("ann", "read", "%RETRY%G")}
        with pytest.raises(Refused, match="neither the retry topic nor the dead-letter topic"):
            gate.give_back("G", Message("t", b"x"))
        ledger.denied.add(("read", "%RETRY%G"))
        broker.rules.changed()
        refused(lambda: gate.give_back("G", Message("%RETRY%G", b"x")))


async def test_a_record_is_shown_to_those_who_may_read_its_topic() -> None:
    async with broker_in_memory() as broker:
        gate, ledger = guarded(broker)
        placed = gate.publish(Message("t", b"x"))
        broker.store.committer.commit()
        await broker.store.flusher.wait_flushed(placed.end)
        assert await gate.queries.record_at(placed.position) is not None
        assert await gate.queries.record_at(-1) is None
        assert await gate.queries.record_at(placed.position + 1) is None
        ledger.denied = {("read", "t")}
        broker.rules.changed()
        with pytest.raises(Refused, match="may not get the message at position 0"):
            await gate.queries.record_at(placed.position)


async def test_a_session_belongs_to_the_identity_that_opened_it() -> None:
    async with broker_in_memory() as broker:
        gate, _ = guarded(broker)
        session, existed = gate.open_session("line", "S", 0, lambda reason: None)
        assert not existed
        assert session.owner == gate.identity.name
        other = broker.gate(Identity("bob"))
        refused(lambda: other.open_session("line", "S", 0, lambda reason: None))
        session.end()
        session, existed = other.open_session("line", "S", 0, lambda reason: None, expiry_s=9)
        assert not existed
        assert session.owner == "bob"


@pytest.mark.parametrize("answer", ["no", 1, 0, [], Identity("root")])
async def test_what_is_no_answer_of_an_authorizer_allows_nothing(answer: object) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.authorizers = (lambda identity, action, name: answer,)  # type: ignore[assignment,return-value]
        for attempt in attempts(broker.gate(ANN)):
            refused(attempt)
        broker.authorizers = (guarded_authorizer("rules", broker.authorizers[0]),)
        with pytest.raises(Refused, match="plugin 'rules' failed in its authorizer; TypeError: it returned"):
            broker.gate(ANN).publish(Message("t", b"x"))


@pytest.mark.parametrize("answer", ["root", True, b"root"])
async def test_what_is_no_answer_of_an_authenticator_proves_nobody(answer: object) -> None:
    async with broker_in_memory() as broker:
        ask = guarded_authenticator("users", lambda credentials, origin: answer)  # type: ignore[arg-type,return-value]
        broker.authentication.authenticators = (ask,)
        with pytest.raises(Refused, match="plugin 'users' failed in its authenticator; TypeError: it returned"):
            await broker.authentication.authenticate_password(Password("root", b"x"), LoginOrigin())


async def test_decisions_take_bounded_memory_and_go_with_the_last_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet.access.rules.DECISIONS_MAX", 10)
    async with broker_in_memory() as broker:
        gate, _ = guarded(broker)
        decisions = broker.rules.of(ANN)
        for number in range(100):
            gate.check("subscribe", f"t{number}")
            gate.check_publish(f"t{number}")
        assert len(decisions._find_cache().of_resources) <= 10
        assert len(decisions.publishable) <= 10
        del gate, decisions
        assert len(broker.rules._in_use) == 0


# authentication


def knows(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
    """An authenticator for passwords and certificates."""
    match credentials:
        case Password("ann", b"secret"):
            return ANN
        case Password():
            raise Refused(Reason.CREDENTIALS, "user or password is wrong")
        case Certificate(name) if name:
            return Identity(name)
    return None


async def test_without_authenticators_everybody_is_anonymous() -> None:
    async with broker_in_memory() as broker:
        asked = broker.authentication
        assert await asked.authenticate_password(Password("ann", b"?"), LoginOrigin()) == ANONYMOUS
        assert asked.authenticate(SignedRequest("key", "?", b""), LoginOrigin()) == ANONYMOUS
        assert asked.authenticate(Certificate("ann", (), b""), LoginOrigin()) == ANONYMOUS


async def test_the_first_authenticator_with_an_opinion_decides() -> None:
    async with broker_in_memory() as broker:
        asked = broker.authentication
        asked.authenticators = (lambda credentials, origin: None, knows, lambda credentials, origin: Identity("nobody"))
        assert await asked.authenticate_password(Password("ann", b"secret"), LoginOrigin()) == ANN
        assert asked.authenticate(Certificate("bob", (), b""), LoginOrigin()) == Identity("bob")
        with pytest.raises(Refused, match="is wrong") as caught:
            await asked.authenticate_password(Password("ann", b"guess"), LoginOrigin())
        assert caught.value.reason is Reason.CREDENTIALS
        assert broker.statistics()["refused_by_authenticators"] == 1


async def test_credentials_that_nobody_checks_are_refused_and_a_certificate_is_not() -> None:
    async with broker_in_memory() as broker:
        asked = broker.authentication
        asked.authenticators = (lambda credentials, origin: None,)
        with pytest.raises(Refused, match="no plugin checks a signed request"):
            asked.authenticate(SignedRequest("key", "?", b""), LoginOrigin())
        with pytest.raises(Refused, match="no plugin checks a password"):
            await asked.authenticate_password(Password("ann", b"?"), LoginOrigin())
        assert asked.authenticate(Certificate("", (), b""), LoginOrigin()) == ANONYMOUS


async def test_a_slow_check_runs_beside_the_event_loop_and_once_for_a_proved_password() -> None:
    async with broker_in_memory() as broker:
        token, checks, stored = trio.lowlevel.current_trio_token(), list[bytes](), [b"hash"]

        def slow(password: bytes) -> None:
            # Would deadlock on the event loop: it answers only while the check waits.
            trio.from_thread.run_sync(lambda: None, trio_token=token)
            checks.append(password)
            if password != b"x":
                raise Refused(Reason.CREDENTIALS, "wrong")

        def check(credentials: Credentials, origin: LoginOrigin) -> PasswordCheck:
            assert isinstance(credentials, Password)
            return PasswordCheck(ANN, stored[0], partial(slow, credentials.password))

        asked = broker.authentication
        asked.authenticators = (check,)
        right, wrong, origin = Password("ann", b"x"), Password("ann", b"y"), LoginOrigin()
        for _ in range(3):
            assert await asked.authenticate_password(right, origin) == ANN
            with pytest.raises(Refused, match="wrong"):
                await asked.authenticate_password(wrong, origin)
        assert checks == [b"x", b"y", b"y", b"y"]
        stored[0] = b"new hash"
        assert await asked.authenticate_password(right, origin) == ANN
        assert checks[-1] == b"x", "a changed verifier is asked again"


async def test_a_check_that_fails_names_its_plugin() -> None:
    async with broker_in_memory() as broker:
        answer = PasswordCheck(ANN, b"", lambda: 1 // 0)
        broker.authentication.authenticators = (guarded_authenticator("users", lambda credentials, origin: answer),)
        for credentials in (Password("ann", b"x"), Password("ann", b"y")):
            with pytest.raises(Refused, match="plugin 'users' failed in its authenticator; ZeroDivisionError"):
                await broker.authentication.authenticate_password(credentials, LoginOrigin())
        with pytest.raises(Refused, match="plugin 'users' failed in its authenticator; TypeError: it returned"):
            broker.authentication.authenticate(Nobody(), LoginOrigin())


async def test_an_authenticator_sees_where_a_client_without_credentials_comes_from() -> None:
    async with broker_in_memory() as broker:
        asked, seen = broker.authentication, list[tuple[Credentials, LoginOrigin]]()

        def only_here(credentials: Credentials, origin: LoginOrigin) -> None:
            seen.append((credentials, origin))
            if origin.address != "127.0.0.1":
                raise Refused(Reason.CREDENTIALS, "log in")

        asked.authenticators = (only_here,)
        here, there = RecordingPeer(), RecordingPeer(address="10.0.0.1:2")
        assert asked.identify(here, "c") == ANONYMOUS
        with pytest.raises(Refused, match="log in"):
            asked.identify(there)
        there.identity = ANN  # its certificate says so
        assert asked.identify(there) == ANN
        assert seen == [(Nobody(), here.login_origin("c")), (Nobody(), there.login_origin())]


def test_secrets_are_not_shown() -> None:
    assert "s3cret" not in repr(Password("ann", b"s3cret")) + repr(SignedRequest("key", "s3cret", b"s3cret", "s3cret"))
