"""The end of a login: requests that wait are refused; the connection closes if it is the connection's own login."""

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from martlet.contracts import AccessKey, Credentials, Identity, LoginOrigin, SignedRequest
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet_remoting.handlers.context import REFUSED_MAX
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.connection import RemotingConnection

from .conftest import FakeClient, Harness, OpenHarness, pull_ext
from .pop_talk import waiting_ext
from .test_revocation import bulk_read, client_of, filtered_pull, notification, pop, pull, visit

WHY = "ann was disabled"
ENDED = Refused(Reason.ENDED, WHY)
HOLDS = [pull, filtered_pull, pop, notification, bulk_read]


@pytest.fixture
async def harness(open_harness: OpenHarness) -> Harness:
    harness = await open_harness(store={"flush": "async"})
    harness.topic("T", 1)
    return harness


async def end(harness: Harness, user: str = "ann") -> None:
    harness.broker.end_clients(lambda identity: identity.name == user, WHY)
    await visit(harness)


def signed(user: str, ext: dict[str, object]) -> dict[str, object]:
    return {**ext, "AccessKey": user, "Signature": "s"}


def believe(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
    return Identity(credentials.access_key) if isinstance(credentials, SignedRequest) else None


def requests_of(client: FakeClient, user: str) -> list[int]:
    """Send a request of each kind that waits, signed by *user*."""
    bulk: dict[str, object] = {"topic": "T", "queueId": 0, "offset": 0, "waitMs": 15_000}
    return [
        client.send(RequestCode.PULL_MESSAGE, signed(user, pull_ext("T", 0, sysFlag="6"))),
        client.send(RequestCode.POP_MESSAGE, signed(user, waiting_ext("T"))),
        client.send(RequestCode.NOTIFICATION, signed(user, waiting_ext("T"))),
        client.send(RequestCode.BULK_READ, signed(user, bulk)),
    ]


async def test_requests_of_a_user_that_signed_them_are_refused_and_no_others(harness: Harness) -> None:
    harness.broker.authentication.authenticators = (believe,)
    proxy = harness.client()
    anns, bobs = requests_of(proxy, "ann"), requests_of(proxy, "bob")
    await harness.step()
    assert not proxy.answers
    await end(harness)
    assert sorted(proxy.answers) == anns
    for number in anns:
        answer = proxy.answers.pop(number)
        assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, WHY)
    assert proxy.peer.closed_with is None
    harness.broker.publish(Message("T", b"x", b"", 0))
    await harness.step()
    assert bobs[0] in proxy.answers
    assert set(proxy.answers) <= set(bobs)
    assert {answer.code for answer in proxy.answers.values()} == {0}


async def test_a_read_in_progress_ends_with_its_login(harness: Harness) -> None:
    harness.broker.authentication.authenticators = (believe,)
    for _ in range(4):
        harness.broker.publish(Message("T", b"x" * 1000, b"", 0))
    await harness.step()
    client = harness.client()
    ext = signed("ann", {"topic": "T", "queueId": 0, "offset": 0})
    number = client.send(RequestCode.BULK_READ, ext)
    [read] = client.handler.context.bulk.unfinished
    read.refuse(ENDED)
    await harness.step()
    assert client.answers.pop(number).code == ResponseCode.NO_PERMISSION


# the connection's own login


@pytest.mark.parametrize("hold", HOLDS)
async def test_a_farewell_refuses_what_waits_in_the_name_of_the_connection(
    harness: Harness, hold: Callable[[Harness, FakeClient, str], int]
) -> None:
    client = client_of(harness, "ann")
    number = hold(harness, client, "A")
    await harness.step()
    client.peer.send(client.connection.farewell(ENDED))
    client.receive()
    answer = client.answers.pop(number)
    assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, WHY)
    assert len(client.handler.context) == 0
    harness.broker.publish(Message("T", b"x", b"", 0))
    await harness.step()
    assert not client.answers
    assert client.connection.farewell(ENDED) == b""
    client.close()


async def test_requests_of_others_over_the_connection_are_not_refused_but_end_with_it(harness: Harness) -> None:
    harness.broker.authentication.authenticators = (believe,)
    client = client_of(harness, "ann")
    own = pull(harness, client, "A")
    requests_of(client, "bob")
    await harness.step()
    client.peer.send(client.connection.farewell(ENDED))
    client.receive()
    assert list(client.answers) == [own]
    assert len(client.handler.context) == 0


async def test_a_farewell_has_a_limited_number_of_answers(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, parked_peer_max=4096)
    harness.topic("T", 1)
    client = client_of(harness, "ann")
    for _ in range(REFUSED_MAX + 10):
        pull(harness, client, "A")
    await harness.step()
    client.peer.send(client.connection.farewell(ENDED))
    client.receive()
    assert len(client.answers) == REFUSED_MAX
    assert harness.state.parked.waiting == 0


def test_a_connection_without_requests_says_nothing() -> None:
    assert RemotingConnection(1000, 10.0, 0.0).farewell(ENDED) == b""


# expiry


class Expiring:
    """Believes who signed a request, for *left_s* seconds from now."""

    def __init__(self, harness: Harness, left_s: float) -> None:
        harness.clock.run()
        self._expires_ms = harness.clock.now_ms() + round(left_s * 1000)
        harness.broker.authentication.authenticators = (self._answer,)

    def _answer(self, credentials: Credentials, origin: LoginOrigin) -> Identity | None:
        if isinstance(credentials, AccessKey):
            return None
        return Identity("ann", expires_ms=self._expires_ms)


async def test_what_waits_is_refused_when_the_login_of_its_signer_expires(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    nursery.start_soon(harness.state.timeouts.run)
    Expiring(harness, 5)
    client = harness.client()
    numbers = requests_of(client, "ann")
    await harness.step()
    await trio.sleep(4)
    await harness.step()
    assert not client.answers
    await trio.sleep(1.6)
    await harness.step()
    assert sorted(client.answers) == numbers
    for answer in client.answers.values():
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "has expired" in str(answer.remark)
    assert client.peer.closed_with is None
    again = await client.ask(RequestCode.PULL_MESSAGE, signed("ann", pull_ext("T", 0)))
    assert again.code == ResponseCode.NO_PERMISSION
