"""Ctrl-C in a command that talks to a broker: exit code 130, whatever its end does to what is under way."""

import argparse
import signal
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from martlet.cli.outcome import Exit, guarded
from martlet_client import ClientClosed
from martlet_remoting.commands.connecting import Work, talking


def outcome(work: Work) -> int:
    return guarded(talking(work), argparse.Namespace(name_server="127.0.0.1:1"))


async def interrupted_once(arguments: object) -> int:
    signal.raise_signal(signal.SIGINT)
    await trio.sleep_forever()


async def interrupted_twice(arguments: object) -> int:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    await trio.sleep_forever()


async def interrupted_with_a_failure_at_the_end(arguments: object) -> int:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        try:
            await interrupted_once(arguments)
        finally:
            raise ClientClosed("the connection was closed")


async def interrupted_with_many_failures(arguments: object) -> int:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(interrupted_with_a_failure_at_the_end, arguments)
        nursery.start_soon(interrupted_with_a_failure_at_the_end, arguments)
    return Exit.OK


@pytest.mark.parametrize(
    "work",
    [
        interrupted_once,
        interrupted_twice,
        interrupted_with_a_failure_at_the_end,
        interrupted_with_many_failures,
    ],
    ids=lambda work: work.__name__,
)
def test_an_interrupted_command_says_130_and_no_more(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(work) == Exit.INTERRUPTED
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_fails_by_itself_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    async def fails(arguments: object) -> int:
        raise ClientClosed("it is over")

    assert outcome(fails) == Exit.FAILED
    assert capsys.readouterr().err == "martlet: it is over\n"


@pytest.fixture
def ignored() -> Iterator[None]:
    """As a shell starts the background jobs of a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored")
def test_who_was_started_to_ignore_it_does() -> None:
    async def goes_on(arguments: object) -> int:
        signal.raise_signal(signal.SIGINT)
        await trio.testing.wait_all_tasks_blocked()
        return Exit.OK

    assert outcome(goes_on) == Exit.OK
