"""The state machine: every command in every state, time, and every cutting of the bytes."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.errors import RemoteProtocolError
from martlet.testing.peers import check_connection
from martlet_line.codec import Limits, decode
from martlet_line.connection import TRANSITIONS, Event, LineConnection, State
from martlet_line.packets import (
    Ack,
    Credit,
    Extend,
    Help,
    Idle,
    Login,
    Malformed,
    Nack,
    Ping,
    Pong,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)

LIMITS = Limits(line_bytes=300, body_bytes=1000, words=10)
LINES: dict[type, bytes] = {
    Publish: b"PUB t x\n",
    Subscribe: b"SUB t\n",
    Unsubscribe: b"UNSUB 1\n",
    Credit: b"CREDIT 1 1\n",
    Ack: b"ACK 1 0 0\n",
    Nack: b"NACK 1 0 0\n",
    Extend: b"EXTEND 1 0 0\n",
    Login: b"LOGIN ann a%20b\n",
    Ping: b"PING\n",
    Pong: b"PONG\n",
    Help: b"HELP\n",
    Quit: b"QUIT\n",
    Malformed: b"FOO\n",
}


def connect(state: State = State.OPEN) -> LineConnection:
    connection = LineConnection(LIMITS, 60.0)
    connection.receive_data(b"PING\n", 0.0)
    if state is State.ASKED:
        connection.handle_timeout(60.0)
    elif state is State.ENDED:
        connection.receive_data(b"QUIT\n", 0.0)
    list(connection.events())
    assert connection.state is state
    return connection


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", LINES)
def test_every_command_in_every_state(state: State, kind: type) -> None:
    connection = connect(state)
    connection.receive_data(LINES[kind], 61.0)
    events = list(connection.events())
    after = TRANSITIONS.get((state, kind))
    if state is State.ENDED:
        assert events == []
        assert connection.state is State.ENDED
    elif after is None:
        assert (state, kind) == (State.OPEN, Pong)
        assert events == [Malformed("PONG: nobody asked")]
        assert connection.state is state
    else:
        assert [type(event) for event in events] == [kind]
        assert connection.state is after


def test_the_table_has_every_command_in_both_open_states() -> None:
    illegal = {(state, kind) for state in State for kind in LINES if (state, kind) not in TRANSITIONS}
    assert illegal == {(State.OPEN, Pong), *((State.ENDED, kind) for kind in LINES)}


def test_a_silent_peer_is_asked_and_then_closed() -> None:
    connection = connect()
    assert connection.deadline() == 60.0
    connection.handle_timeout(60.0)
    assert list(connection.events()) == [Idle()]
    assert connection.deadline() == 120.0
    with pytest.raises(RemoteProtocolError, match="nothing was received for 120 s"):
        connection.handle_timeout(120.0)
    assert list(connection.events()) == []
    assert connection.deadline() == math.inf


def test_any_command_answers_the_question() -> None:
    connection = connect(State.ASKED)
    connection.receive_data(b"HELP\n", 100.0)
    assert connection.state is State.OPEN
    assert connection.deadline() == 160.0


def test_a_peer_that_never_spoke_has_the_same_time_as_others() -> None:
    connection = LineConnection(LIMITS, 60.0)
    assert connection.deadline() < 0
    connection.handle_timeout(5.0)
    assert list(connection.events()) == []
    assert connection.deadline() == 65.0


def test_idle_time_can_be_switched_off() -> None:
    assert LineConnection(LIMITS, 0).deadline() == math.inf  # of a peer that never spoke
    connection = LineConnection(LIMITS, 0)
    connection.receive_data(b"PING\n", 5.0)
    assert connection.deadline() == math.inf


def test_what_follows_quit_is_not_read() -> None:
    connection = connect()
    connection.receive_data(b"PING\nQUIT\nPING\n", 1.0)
    assert list(connection.events()) == [Ping(), Quit()]
    connection.receive_data(b"PING\n" * 10_000, 2.0)
    assert list(connection.events()) == []


def single(event: Event) -> Iterable[Event]:
    """A run of publishes as single ones: how many come together depends on the cutting."""
    if isinstance(event, Publish):
        return [Publish(event.topic, [b], [p]) for b, p in zip(event.bodies, event.properties, strict=True)]
    return [event]


def check(data: bytes) -> None:
    expected = [part for command in decode(data, LIMITS)[0] for part in single(command)]
    check_connection(lambda: LineConnection(LIMITS, 60.0), data, expected, flatten=single)


def test_commands_do_not_depend_on_how_their_bytes_are_cut() -> None:
    check(b"".join(line for kind, line in LINES.items() if kind not in (Quit, Pong)))
    check(b"PUT t 5 k=v\na\nb\r\n\nPUB t a=b c\r\n\nPUT t 0\n\nPUB t x\nPUT u 3\nPUT\nSUB t from offset 3\nPUB")


COMMANDS = st.sampled_from([line for kind, line in LINES.items() if kind not in (Quit, Pong)])


@settings(deadline=None)
@given(
    lines=st.lists(
        st.one_of(COMMANDS, st.binary(max_size=9).map(lambda b: b"PUT t %d\n%b\n" % (len(b), b))), max_size=6
    )
)
def test_no_conversation_depends_on_how_its_bytes_are_cut(lines: list[bytes]) -> None:
    check(b"".join(lines))


def feed(connection: LineConnection, data: bytes, size: int) -> None:
    for at in range(0, len(data), size):
        connection.receive_data(data[at : at + size], 0.0)


@pytest.mark.parametrize(
    "data", [b"x" * 301, b"PUB t " + b"x" * 301 + b"\n", b"PUT t 1001\n", b"PUT t 2\nabc\n", b"PUT\n"]
)
def test_hostile_input_closes_the_peer_however_it_is_cut(data: bytes) -> None:
    for size in (1, 7, len(data)):
        connection = LineConnection(LIMITS, 60.0)
        with pytest.raises(RemoteProtocolError) as caught:
            feed(connection, data, size)
        farewell = connection.farewell(caught.value)
        assert farewell.startswith(b"ERR PROTOCOL ")
        assert farewell.endswith(b"\n")
