"""Requests that wait are refused when the rules change, without another message; the others wait on."""

from collections.abc import Callable

import pytest

from martlet.access.revocation import Waiter
from martlet.contracts import AccessEvent, Identity, SignedRequest
from martlet.message import Message
from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .conftest import FakeClient, Harness, OpenHarness, pull_ext
from .pop_talk import waiting_ext

Hold = Callable[[Harness, FakeClient, str], int]


def pull(harness: Harness, client: FakeClient, group: str) -> int:
    return client.send(RequestCode.PULL_MESSAGE, pull_ext("T", 0, sysFlag="6", consumerGroup=group))


def filtered_pull(harness: Harness, client: FakeClient, group: str) -> int:
    ext = pull_ext("T", 0, sysFlag="6", consumerGroup=group, subscription="tag")
    return client.send(RequestCode.PULL_MESSAGE, ext)


def retry_pull(harness: Harness, client: FakeClient, group: str) -> int:
    harness.topic(f"%RETRY%{group}", 1)
    return client.send(RequestCode.PULL_MESSAGE, pull_ext(f"%RETRY%{group}", 0, sysFlag="6", consumerGroup=group))


def pop(harness: Harness, client: FakeClient, group: str) -> int:
    return client.send(RequestCode.POP_MESSAGE, waiting_ext("T", consumerGroup=group))


def notification(harness: Harness, client: FakeClient, group: str) -> int:
    return client.send(RequestCode.NOTIFICATION, waiting_ext("T", consumerGroup=group))


def bulk_read(harness: Harness, client: FakeClient, group: str) -> int:
    return client.send(RequestCode.BULK_READ, {"topic": "T", "queueId": 0, "offset": 0, "waitMs": 15_000})


class Rules:
    """Denies the pairs ``(user, name)`` that the test sets."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.denied: set[tuple[str, str]] = set()
        harness.broker.authorizers = (lambda identity, action, name: (identity.name, name) not in self.denied,)
        self.refusals = 0  # that listeners, such as an audit trail, were told
        harness.broker.rules.listeners.append(self._note)

    def _note(self, event: AccessEvent) -> None:
        self.refusals += not event.verdict.allowed

    async def deny(self, *denied: tuple[str, str]) -> None:
        self.denied = set(denied)
        self.harness.broker.rules.changed()
        await visit(self.harness)


async def visit(harness: Harness) -> None:
    while harness.broker.revocation.is_visiting:
        harness.broker.revocation.visit_some()
    await harness.step()


def client_of(harness: Harness, user: str) -> FakeClient:
    client = harness.client()
    client.peer.identity = Identity(user)
    return client


@pytest.fixture
async def rules(harness: Harness) -> Rules:
    harness.topic("T", 1)
    return Rules(harness)


@pytest.mark.parametrize("name", ["T", "group"])
@pytest.mark.parametrize("hold", [pull, filtered_pull, retry_pull, pop, notification, bulk_read])
async def test_what_waits_is_refused_at_once_and_others_get_the_next_message(
    harness: Harness, rules: Rules, hold: Hold, name: str
) -> None:
    if (hold, name) in ((bulk_read, "group"), (retry_pull, "T")):
        return  # they need no such permission
    ann, bob = client_of(harness, "ann"), client_of(harness, "bob")
    held, other = hold(harness, ann, "A"), hold(harness, bob, "B")
    await harness.step()
    assert not ann.answers
    await rules.deny(("ann", "%RETRY%A" if name == "group" else "T"))
    answer = ann.answers.pop(held)
    assert answer.code == ResponseCode.NO_PERMISSION
    assert "'ann' may not subscribe" in str(answer.remark)
    assert rules.refusals == 1
    assert not bob.answers
    assert [len(client.handler.context) for client in (ann, bob)] == [0, 1]
    topic = "%RETRY%B" if hold is retry_pull else "T"
    harness.broker.publish(Message(topic, b"x", b"TAGS\x01tag\x02", 0))
    await harness.step()
    assert bob.answers.pop(other).code == 0
    assert not ann.answers


async def test_a_pop_that_may_wait_keeps_its_turn(harness: Harness, rules: Rules) -> None:
    ann, bob, cid = [client_of(harness, name) for name in ("ann", "bob", "cid")]
    held = [pop(harness, client, "G") for client in (ann, bob, cid)]
    await harness.step()
    await rules.deny(("ann", "T"))
    assert ann.answers.pop(held[0]).code == ResponseCode.NO_PERMISSION
    harness.broker.publish(Message("T", b"x", b"", 0))
    await harness.step()
    assert bob.answers.pop(held[1]).code == 0
    assert not cid.answers


async def test_a_request_is_refused_by_the_identity_that_signed_it(harness: Harness, rules: Rules) -> None:
    harness.broker.authentication.authenticators = (
        lambda credentials, origin: (
            Identity(credentials.access_key) if isinstance(credentials, SignedRequest) else None
        ),
    )
    signer = harness.client()
    numbers = {}
    for user in ("ann", "bob"):
        ext = {**pull_ext("T", 0, sysFlag="6"), "AccessKey": user, "Signature": "s"}
        numbers[user] = signer.send(RequestCode.PULL_MESSAGE, ext)
    await harness.step()
    await rules.deny(("ann", "T"))
    assert list(signer.answers) == [numbers["ann"]]
    assert signer.answers.pop(numbers["ann"]).code == ResponseCode.NO_PERMISSION


async def test_a_pull_that_waited_is_checked_again_however_it_ends(harness: Harness, rules: Rules) -> None:
    """Its time is over in the turn in which the rules change and a message comes: it gets no message."""
    ann = client_of(harness, "ann")
    held = pull(harness, ann, "A")
    await harness.step()
    rules.denied = {("ann", "T")}
    harness.broker.rules.changed()
    [waiting] = list(harness.state.parked.waiting_pulls())
    harness.state.timeouts.give_up(waiting)
    waiting.expire()
    harness.broker.publish(Message("T", b"x", b"", 0))
    await harness.step()
    assert ann.answers.pop(held).code == ResponseCode.NO_PERMISSION


async def test_a_pull_whose_answer_left_meanwhile_is_not_answered_twice(harness: Harness, rules: Rules) -> None:
    ann = client_of(harness, "ann")
    holds: list[Hold] = [pull, pop, bulk_read]
    numbers = [hold(harness, ann, "A") for hold in holds]
    await harness.step()
    state = harness.state
    waiters: list[Waiter] = [
        *state.parked.waiting_pulls(),
        *state.pops.waiting_pops(),
        *state.bulk_reads.waiting_reads(),
    ]
    assert len(waiters) == 3
    harness.broker.publish(Message("T", b"x", b"", 0))
    await harness.step()
    assert [ann.answers.pop(number).code for number in numbers] == [0, 0, 0]
    rules.denied = {("ann", "T")}
    harness.broker.rules.changed()
    for waiter in waiters:
        waiter.recheck()
    await harness.step()
    assert not ann.answers


async def test_one_visit_checks_very_many_pulls_in_slices(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, parked_peer_max=4096)
    harness.topic("T", 1)
    rules, client = Rules(harness), client_of(harness, "ann")
    for _ in range(1000):
        pull(harness, client, "A")
    await harness.step()
    rules.denied = {("ann", "T")}
    harness.broker.rules.changed()
    slices = 0
    while harness.broker.revocation.is_visiting:
        harness.broker.revocation.visit_some()
        slices += 1
    assert slices >= 20
    await harness.step()
    assert {answer.code for answer in client.answers.values()} == {ResponseCode.NO_PERMISSION}
    assert len(client.answers) == 1000
