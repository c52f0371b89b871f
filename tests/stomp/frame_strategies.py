"""Hypothesis strategies for frames of every version, and what their events are, message by message."""

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from martlet_stomp.wire.codec import encode_frame
from martlet_stomp.wire.connection import StompConnection
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import AckRun, SendRun, Version

VERSIONS = st.sampled_from(list(Version))
# Everything that has a meaning in a frame, and a little else.
TEXTS = st.text(st.sampled_from("ab:\\\n\r c\tä€😀"), max_size=12)
NAMES = TEXTS.filter(bool)
WORDS = st.text("abc/-_.0", min_size=1, max_size=8)
PLACES = st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 10**18 - 1))
RECEIPTS = st.one_of(st.none(), st.none(), WORDS, TEXTS)
LINE_ENDS = st.sampled_from([b"", b"", b"\n", b"\r\n", b"\n\n"])


def for_version(text: str, version: Version) -> str:
    """Return what of *text* a frame of *version* can say."""
    if version is Version.V1_0:
        text = text.replace("\n", "").strip()
    return text.replace("\r", "") if version is not Version.V1_2 else text


def name_for(text: str, version: Version) -> str:
    """Return what of *text* can be the name of a header in a frame of *version*; it may be empty."""
    return for_version(text.replace(":", "") if version is Version.V1_0 else text, version)


def _headers(draw: Any, version: Version, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return *pairs* as a frame of *version* can contain them, in any order."""
    found = []
    for name, value in pairs:
        plain = name_for(name, version)
        if plain:
            found.append((plain, for_version(value, version)))
    return list(draw(st.permutations(found)))


@st.composite
def sends(draw: Any, version: Version) -> bytes:
    """Return a SEND frame."""
    body = draw(st.one_of(st.binary(max_size=20), st.just(b"x" * 30), st.just(b"SEND\n\n\0")))
    pairs = [("destination", draw(st.sampled_from(["/queue/a", "/queue/b", "/topic/ä:b"])))]
    if b"\0" in body or draw(st.booleans()):
        pairs.append(("content-length", str(len(body))))
    receipt = draw(RECEIPTS)
    if receipt is not None:
        pairs.append(("receipt", receipt))
    if draw(st.integers(0, 5)) == 0:
        pairs.append(("transaction", draw(st.sampled_from(["t1", "t2"]))))
    pairs += draw(st.lists(st.tuples(NAMES, TEXTS), max_size=2))
    return encode_frame("SEND", _headers(draw, version, pairs), body, version)


@st.composite
def acks(draw: Any, version: Version) -> bytes:
    """Return an ACK frame."""
    subscription, queue_id, offset = draw(PLACES)
    pairs = [("id" if version is Version.V1_2 else "message-id", f"{subscription}-{queue_id}-{offset}")]
    receipt = draw(RECEIPTS)
    if receipt is not None:
        pairs.append(("receipt", receipt))
    for name, values in (("subscription", TEXTS), ("transaction", WORDS), ("x", TEXTS)):
        if draw(st.integers(0, 3)) == 0:
            pairs.append((name, draw(values)))
    return encode_frame("ACK", _headers(draw, version, pairs), b"", version)


@st.composite
def others(draw: Any, version: Version) -> bytes:
    """Return a frame that has no runs."""
    command = draw(st.sampled_from(["BEGIN", "COMMIT", "ABORT", "SUBSCRIBE"]))
    pairs = [("transaction", draw(WORDS)), ("id", draw(WORDS)), ("destination", "/queue/a")]
    return encode_frame(command, pairs, b"", version)


@st.composite
def streams(draw: Any, version: Version) -> bytes:
    """Return frames as a connected client may send them, usual and unusual ones, also with line ends between them."""
    kinds = st.one_of(sends(version), sends(version), acks(version), others(version))
    frames = draw(st.lists(kinds, max_size=6))
    if frames and draw(st.booleans()):
        frames += [frames[-1]] * draw(st.integers(1, 3))
    if draw(st.integers(0, 3)) == 0:
        frames = [each if b"\\" in each else _with_carriage_returns(each) for each in frames]
    return b"".join(each + draw(LINE_ENDS) for each in frames)


def _with_carriage_returns(frame: bytes) -> bytes:
    head, blank, body = frame.partition(b"\n\n")
    return head.replace(b"\n", b"\r\n") + b"\r\n\r\n" + body if blank else frame


def flatten(event: Any) -> list[Any]:
    """Return *event* as one tuple for each frame of a run, so that it does not matter how frames form runs."""
    if isinstance(event, SendRun):
        return [
            ("SEND", headers.destination, headers.pairs, body, event.receipt_of(index), event.transaction)
            for index, (headers, body) in enumerate(zip(event.headers, event.bodies, strict=True))
        ]
    if isinstance(event, AckRun):
        places = zip(event.subscriptions, event.queue_ids, event.offsets, strict=True)
        return [("ACK", *place, event.receipt_of(index), event.transaction) for index, place in enumerate(places)]
    return [event]


def feed(connection: StompConnection, pieces: Iterable[bytes]) -> None:
    """Let *connection* receive *pieces*, and drop its events."""
    for piece in pieces:
        connection.receive_data(piece, 0.0)
        for _ in connection.events():
            pass


def events_of(connection: StompConnection, pieces: Iterable[bytes]) -> list[object]:
    """Return the events of *pieces*, and at last the error that ended the connection, if there was one."""
    found: list[object] = []
    for piece in pieces:
        connection.receive_data(piece, 0.0)
        try:
            for event in connection.events():
                found += flatten(event)
        except StompError as error:
            return [*found, str(error), error.receipt]
    return found
