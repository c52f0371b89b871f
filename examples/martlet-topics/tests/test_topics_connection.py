"""The state machine: every command in every state, limits, time, and every cutting of the bytes."""

import math

import pytest

from martlet.errors import RemoteProtocolError
from martlet.testing.peers import check_connection
from martlet_topics.codec import Limits
from martlet_topics.connection import TRANSITIONS, State, TopicsConnection
from martlet_topics.packets import (
    Acknowledge,
    Command,
    Forget,
    Hello,
    Ping,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)

LIMITS = Limits(line_bytes=60, run_bytes=1000, run_messages=10)
RUN = b"a/b 3\nx\ny\n"
LINES: dict[type, tuple[bytes, Command]] = {
    Hello: (b"HELLO me\n", Hello("me")),
    Subscribe: (b"SUB a/# 1\n", Subscribe("a/#", 1)),
    Unsubscribe: (b"UNSUB a/#\n", Unsubscribe("a/#")),
    Publish: (b"RUN 1 1 10\n" + RUN, Publish(1, (b"a/b",), (b"x\ny",), RUN, (10,))),
    Acknowledge: (b"ACK 1 2\n", Acknowledge(1, 2)),
    Ping: (b"PING\n", Ping()),
    Forget: (b"FORGET\n", Forget()),
    Quit: (b"QUIT\n", Quit()),
}


def connect(state: State = State.NEW) -> TopicsConnection:
    connection = TopicsConnection(LIMITS, 60.0, 0.0)
    if state is not State.NEW:
        connection.receive_data(b"HELLO\n", 0.0)
    if state is State.ENDED:
        connection.receive_data(b"QUIT\n", 0.0)
    list(connection.events())
    assert connection.state is state
    return connection


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("kind", list(LINES))
def test_every_command_in_every_state(state: State, kind: type) -> None:
    connection, (data, packet) = connect(state), LINES[kind]
    connection.receive_data(data, 1.0)
    after = TRANSITIONS.get((state, kind))
    if state is State.ENDED:
        assert list(connection.events()) == []
        assert connection.buffered_bytes == 0
    elif after is None:
        with pytest.raises(RemoteProtocolError, match="is not expected in state"):
            list(connection.events())
        assert connection.state is state
    else:
        assert list(connection.events()) == [packet]
        assert connection.state is after


def test_every_cutting_makes_the_same_commands() -> None:
    kinds = (Hello, Subscribe, Publish, Publish, Acknowledge, Ping, Unsubscribe, Quit)
    data = b"".join(LINES[kind][0] for kind in kinds)
    check_connection(connect, data + b"PING\n", [LINES[kind][1] for kind in kinds])


def test_commands_after_the_end_are_not_read() -> None:
    connection = connect(State.OPEN)
    connection.receive_data(b"FORGET\nPING\n", 0.0)
    assert list(connection.events()) == [Forget()]
    connection.receive_data(b"PING\n", 0.0)
    assert list(connection.events()) == []


def test_commands_before_a_wrong_one_are_acted_on() -> None:
    connection = connect(State.OPEN)
    connection.receive_data(b"PING\nWRONG\nPING\n", 0.0)
    events = connection.events()
    assert next(events) == Ping()
    with pytest.raises(RemoteProtocolError, match="'WRONG' is not a command"):
        next(events)


@pytest.mark.parametrize("data", [b"x" * 61, b"SUB " + b"x" * 57 + b"\n", b"PING\n" + b"x" * 61])
def test_a_line_has_a_limit(data: bytes) -> None:
    connection = connect(State.OPEN)
    connection.receive_data(data, 0.0)
    with pytest.raises(RemoteProtocolError, match="a line is longer than 60 bytes"):
        list(connection.events())


def test_a_long_run_is_no_long_line() -> None:
    connection = connect(State.OPEN)
    body = b"x" * 500
    frame = b"a 500\n" + body + b"\n"
    connection.receive_data(b"RUN 1 1 %d\n" % len(frame) + frame[:400], 0.0)
    assert list(connection.events()) == []
    assert connection.buffered_bytes > 400
    connection.receive_data(frame[400:], 0.0)
    (run,) = connection.events()
    assert isinstance(run, Publish)
    assert run.bodies == (body,)
    assert connection.buffered_bytes == 0


def test_a_client_that_is_silent_for_too_long_is_told() -> None:
    connection = connect(State.OPEN)
    assert connection.deadline() == 60.0
    connection.receive_data(b"P", 50.0)
    assert connection.deadline() == 110.0
    with pytest.raises(RemoteProtocolError, match="nothing was heard for 60 s; send PING"):
        connection.handle_timeout(110.0)
    assert TopicsConnection(LIMITS, 0, 5.0).deadline() == math.inf


def test_whoever_breaks_the_protocol_is_told_why() -> None:
    assert connect().farewell(RemoteProtocolError("why")) == b"ERR 0 0 PROTOCOL why\n"
