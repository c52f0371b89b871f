"""The end of a login: ERROR with its reason, and then the connection closes; what waits for the client waits on."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.wire_clients.stomp import StompBroker, StompClient, stomp_broker
from trio.testing import MockClock

from martlet.contracts import Credentials, Identity, LoginOrigin, Password, PasswordCheck
from martlet.testing.clock import TrioClock
from martlet_stomp.wire.packets import Version

WHY = "ann was disabled"


@pytest.fixture
async def stomp(tmp_path: Path) -> AsyncIterator[StompBroker]:
    async with stomp_broker(tmp_path) as found:
        yield found


def end(stomp: StompBroker, user: str = "ann") -> None:
    stomp.broker.end_clients(lambda identity: identity.name == user, WHY)


async def error_of(talk: StompClient) -> str:
    return (await talk.error())["message"]


@pytest.mark.parametrize("version", Version)
async def test_all_connections_of_a_user_end_with_an_error_and_no_others(stomp: StompBroker, version: Version) -> None:
    bob = await stomp.connect_as("bob")
    anns = [await stomp.connect(version, login="ann", passcode="ann") for _ in range(2)]
    end(stomp)
    for talk in anns:
        assert await error_of(talk) == WHY
    assert await bob.rest() == []
    while len(stomp.context.clients) > 1:
        await trio.lowlevel.checkpoint()


async def test_what_a_client_holds_goes_to_another_one(stomp: StompBroker) -> None:
    ann, bob = await stomp.connect_as("ann"), await stomp.connect_as("bob")
    await ann.subscribe("/queue/q", "client-individual", prefetch_count="5")
    await bob.publish("/queue/q", *[b"%d" % number for number in range(8)])
    await ann.messages(5)
    await bob.subscribe("/queue/q", "client-individual")
    end(stomp)
    assert await error_of(ann) == WHY
    assert sorted(each.body for each in await bob.messages(8)) == [b"%d" % number for number in range(8)]


async def test_a_durable_subscription_waits_for_its_client(stomp: StompBroker) -> None:
    durable = {"durable": "true", "auto_delete": "false"}
    ann, bob = await stomp.connect_as("ann"), await stomp.connect_as("bob")
    await ann.subscribe("/topic/t", "client-individual", **durable)
    end(stomp)
    await error_of(ann)
    await bob.publish("/topic/t", b"missed")
    ann = await stomp.connect_as("ann")
    await ann.subscribe("/topic/t", "client-individual", **durable)
    assert await ann.bodies(1) == [b"missed"]


async def test_an_open_transaction_is_aborted(stomp: StompBroker) -> None:
    ann = await stomp.connect_as("ann")
    await ann.send(
        ann.frame("BEGIN", transaction="t"), ann.frame("SEND", b"x", destination="/queue/q", transaction="t")
    )
    await ann.subscribe("/queue/q")
    end(stomp)
    await error_of(ann)
    assert stomp.records("q") == []


async def test_a_login_in_progress_is_refused(stomp: StompBroker) -> None:
    checked, may_end = trio.Event(), trio.Event()

    async def wait(work: Callable[[], Any]) -> Any:
        checked.set()
        await may_end.wait()
        return work()

    def answer(credentials: Credentials, origin: LoginOrigin) -> PasswordCheck:
        assert isinstance(credentials, Password)
        return PasswordCheck(Identity(credentials.user), b"verifier", lambda: None)

    stomp.broker.authentication.authenticators = (answer,)
    stomp.broker.authentication.line._in_thread = wait
    talk = stomp.open()
    await talk.send(talk.frame("CONNECT", accept_version="1.2", host="h", login="ann", passcode="x"))
    await checked.wait()
    end(stomp)
    may_end.set()
    assert await error_of(talk) == WHY
    assert not stomp.context.clients


async def test_a_login_that_expires_ends_the_connection(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path, clock=TrioClock()) as stomp:
        expires_ms = stomp.broker.clock.now_ms() + 10_000
        stomp.broker.authentication.authenticators = (lambda asked, origin: Identity("ann", expires_ms=expires_ms),)
        ann = await stomp.connect(login="ann", passcode="x")
        begun = trio.current_time()
        assert await error_of(ann) == "the login of 'ann' has expired"
        assert trio.current_time() - begun == pytest.approx(10, abs=0.1)
        _, answer = await stomp.answer(login="ann", passcode="x")
        assert (answer.command, answer["message"]) == ("ERROR", "the login of 'ann' has expired")
