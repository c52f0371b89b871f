"""The normative statements of STOMP 1.0, 1.1 and 1.2, and which test shows that the broker meets each.

The specifications do not number what they demand. The numbers here count the statements of a section in its order, and
each line says whom the statement binds, and in short what it says. STOMP 1.0 has no key words; what it calls required,
or says that a broker does, is a statement. Of 1.1 and 1.2, those with MUST and REQUIRED are, and those with SHOULD that
bind a broker. A test names what it shows with `statement`; `page` renders all of it as a page of the documentation.
"""

import ast
import importlib
from collections.abc import Callable, Iterator
from enum import Enum, unique
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, final

from martlet_stomp.wire.packets import Version

__all__ = ["STATEMENTS", "Binds", "Statement", "page", "shown_by", "statement"]

ROOT: Final = Path(__file__).parents[2]
MODULES: Final = "test_normative_*.py"
WORDS_MAX: Final = 14
F = TypeVar("F", bound=Callable[..., Any])


@unique
class Binds(Enum):
    """Whom a statement binds."""

    SERVER = "server"
    CLIENT = "client"
    BOTH = "both"


@final
class Statement(NamedTuple):
    """One statement of the specification of *version*."""

    version: Version
    number: str
    binds: Binds
    summary: str

    @property
    def binds_a_server(self) -> bool:
        return self.binds is not Binds.CLIENT


_V1_0: Final = """
frames-1 both a frame is a command, header lines, a blank line, a body and NUL
frames-2 both line feeds may follow the NUL
frames-3 both header names and values are separated by the first colon
frames-4 client padding around a value, as in the examples, is not part of it
connect-1 server CONNECT is answered with CONNECTED
connect-2 server CONNECTED has a session identifier that is unique
SEND-1 client SEND has the header destination
SEND-2 server SEND may name a transaction
SEND-3 server with content-length, that many bytes are the body, whatever they are
SEND-4 both a frame with content-length ends with NUL, too
SEND-5 server without content-length the first NUL ends the frame
SUBSCRIBE-1 client SUBSCRIBE has the header destination
SUBSCRIBE-2 server messages of the destination come as MESSAGE frames
SUBSCRIBE-3 server ack is auto if it is absent
SUBSCRIBE-4 client ack is auto or client
SUBSCRIBE-5 server with ack client a message is consumed when its ACK came
SUBSCRIBE-6 server the body of SUBSCRIBE is ignored
SUBSCRIBE-7 server MESSAGE has the header subscription if SUBSCRIBE had an id
UNSUBSCRIBE-1 server UNSUBSCRIBE ends the subscription
UNSUBSCRIBE-2 client UNSUBSCRIBE has the header destination or id
BEGIN-1 server what is sent and acknowledged in a transaction is handled atomically
BEGIN-2 client BEGIN has the header transaction
COMMIT-1 client COMMIT has the header transaction
ACK-1 client ACK has the header message-id of the message
ACK-2 server ACK may name a transaction
ABORT-1 client ABORT has the header transaction
DISCONNECT-1 server DISCONNECT ends the connection
receipt-1 server receipt in any frame but CONNECT is answered with RECEIPT
MESSAGE-1 server MESSAGE has the header destination
MESSAGE-2 server MESSAGE has the header message-id, which is unique
MESSAGE-3 server the body of MESSAGE is that of the message
MESSAGE-4 server MESSAGE should have a content-length
RECEIPT-1 server RECEIPT has the header receipt-id with the value of receipt
RECEIPT-2 server the body of RECEIPT is empty
ERROR-1 server ERROR should have the header message
ERROR-2 server ERROR should have a content-length
"""

_BOTH: Final = """
frames-1 both commands and header names are case sensitive
encoding-1 both commands and headers are UTF-8
encoding-2 both all frames but CONNECT and CONNECTED are escaped
encoding-3 both the escapes of the version are decoded
encoding-4 both an undefined escape is a fatal error
encoding-5 both headers are escaped when they are encoded
encoding-6 both headers are never trimmed or padded
body-1 both only SEND, MESSAGE and ERROR have a body
content-length-1 both with content-length, that many bytes are the body, whatever they are
content-length-2 both a frame with content-length ends with NUL, too
content-length-3 both a body with NUL has a content-length
content-length-4 both MESSAGE and ERROR should have a content-length
content-type-1 both MESSAGE and ERROR should have a content-type if it is known
content-type-2 both UTF-8 is supported
receipt-1 server receipt in any frame but CONNECT is answered with RECEIPT
repeated-1 both of repeated headers only the first should be used
limits-1 server a frame beyond the limits should be answered with ERROR, then closed
connect-1 server an accepted CONNECT is answered with CONNECTED
connect-2 server a rejected CONNECT should be answered with ERROR, then closed
connect-3 server clients may connect and disconnect rapidly
connect-4 client CONNECT has the headers accept-version and host
CONNECTED-1 server CONNECTED has the header version
CONNECTED-2 server the header server begins with a name, with an optional version
versions-1 server without accept-version the client speaks 1.0
versions-2 server the highest version that both have in common is used
SEND-1 client SEND has the header destination
SEND-2 server user-defined headers of SEND are in MESSAGE
SEND-3 server a SEND that cannot be processed gets ERROR, then the connection closes
SUBSCRIBE-1 client SUBSCRIBE has the header destination
SUBSCRIBE-2 server messages of the destination come as MESSAGE frames
SUBSCRIBE-3 server a subscription that cannot be created gets ERROR, then the connection closes
SUBSCRIBE-4 client SUBSCRIBE has the header id
SUBSCRIBE-5 client ack is auto, client or client-individual
SUBSCRIBE-6 server ack is auto if it is absent
SUBSCRIBE-7 client with ack client, the client sends ACK for what it processed
SUBSCRIBE-8 server with ack client, ACK also counts for all earlier messages
SUBSCRIBE-9 server with ack client-individual, ACK counts for no other message
UNSUBSCRIBE-1 server after UNSUBSCRIBE no messages of the subscription come
UNSUBSCRIBE-2 client UNSUBSCRIBE has the id of an existing subscription
BEGIN-1 client BEGIN has the header transaction
BEGIN-2 server a transaction is aborted by DISCONNECT, and when the connection fails
BEGIN-3 server what is sent and acknowledged in a transaction is handled atomically
COMMIT-1 client COMMIT has the header transaction with the transaction to commit
ABORT-1 client ABORT has the header transaction with the transaction to abort
DISCONNECT-1 client a client sends nothing after DISCONNECT
MESSAGE-1 server MESSAGE has the headers destination, message-id and subscription
MESSAGE-2 server message-id is unique, and subscription the id of SUBSCRIBE
ERROR-1 server ERROR should have the header message
ERROR-2 server ERROR should have the receipt-id of the frame that caused it
ERROR-3 server the connection closes after ERROR
beats-1 both heart-beat is two numbers of milliseconds with a comma
beats-2 both a missing heart-beat is like 0,0
beats-3 both the interval in a direction is the larger of both sides' values
beats-4 both the sender sends something within each interval, if need be a line feed
beats-5 both any bytes show that the other side is alive
beats-6 both the receiver should tolerate inaccuracies
"""

_ONLY_1_1: Final = """
connect-5 server STOMP should be handled like CONNECT
versions-3 server without a common version the answer should be ERROR with the supported ones
ACK-1 client ACK has message-id and subscription of the message
ACK-2 server ACK may name a transaction
NACK-1 client NACK has message-id and subscription of the message
NACK-2 server NACK counts for one message, or with ack client for earlier ones too
RECEIPT-1 server RECEIPT has the header receipt-id with the value of receipt
RECEIPT-2 server the body of RECEIPT is empty
"""

_ONLY_1_2: Final = """
frames-2 both lines end with LF, or CR LF
connect-5 server STOMP is handled like CONNECT
versions-3 server without a common version the answer is ERROR, and the connection closes
SUBSCRIBE-10 client subscriptions of a connection have different ids
ACK-1 client ACK has the id in the header ack of the message
ACK-2 server ACK may name a transaction
NACK-1 client NACK has the id in the header ack of the message
NACK-2 server NACK counts for one message, or with ack client for earlier ones too
BEGIN-4 client transactions of a connection have different names
MESSAGE-3 server MESSAGE has the header ack if the subscription needs ACK
MESSAGE-4 server destination of MESSAGE should be that of SEND
RECEIPT-1 server RECEIPT has the header receipt-id with the value of receipt
RECEIPT-2 server RECEIPT says that all previous frames were received
RECEIPT-3 server frames that were received should be processed even after a disconnect
"""


def _table() -> Iterator[Statement]:
    texts = ((Version.V1_0, _V1_0), (Version.V1_1, _BOTH + _ONLY_1_1), (Version.V1_2, _BOTH + _ONLY_1_2))
    for version, text in texts:
        for line in filter(None, text.splitlines()):
            number, binds, summary = line.split(" ", 2)
            yield Statement(version, f"STOMP-{version.text}-{number}", Binds(binds), summary)


STATEMENTS: Final = {each.number: each for each in _table()}

# What `statement` noted: each statement with its tests.
_TESTS: Final[dict[str, set[str]]] = {}


def statement(version: Version, *numbers: str) -> Callable[[F], F]:
    """Note that the decorated test shows that the broker meets *numbers* (``SEND-1``) of *version*."""
    whole = [f"STOMP-{version.text}-{number}" for number in numbers]
    unknown = [number for number in whole if number not in STATEMENTS]
    if unknown or not numbers:
        raise LookupError(f"STOMP has no statements {unknown}; give some of those in the table")

    def note(test: F) -> F:
        path = Path(test.__code__.co_filename).relative_to(ROOT)
        for number in whole:
            _TESTS.setdefault(number, set()).add(f"{path.as_posix()}::{test.__name__}")
        return test

    return note


def shown_by() -> dict[str, list[str]]:
    """Return the tests of each statement that has some, as pytest names them."""
    for path in sorted(Path(__file__).parent.glob(MODULES)):
        importlib.import_module(f"tests.stomp.{path.stem}")
    return {key: sorted(names) for key, names in _TESTS.items()}


@cache
def defined_tests(path: Path) -> set[str]:
    """Return the names of the tests in the file *path*."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


HEAD: Final = """\
# STOMP conformance

Generated from the marks of the tests by `python -m tests.stomp.normative`.

This page lists the demands of the specifications of STOMP 1.0, 1.1 and 1.2 in short, the side that each binds, and the
tests that show that the broker meets it. CI runs all of them for each change, so each is met in the version that this
page belongs to. The specifications do not number their statements: the numbers here count the statements of a section.
The specifications have the exact words.

"""


def page() -> str:
    """Return the table of all statements and their tests as Markdown."""
    tests, parts = shown_by(), [HEAD]
    for version in Version:
        rows = [each for each in STATEMENTS.values() if each.version is version]
        bound = [each for each in rows if each.binds_a_server]
        tested = sum(each.number in tests for each in bound)
        parts.append(
            f"## STOMP {version.text}\n\n"
            f"{len(rows)} statements; {len(bound)} bind a server, of which {tested} are tested.\n\n"
        )
        parts.append("| number | binds | what it says | tests |\n|---|---|---|---|\n")
        parts += [_row(each, tests.get(each.number, [])) for each in rows]
        parts.append("\n")
    return "".join(parts).rstrip("\n") + "\n"


def _row(each: Statement, tests: list[str]) -> str:
    shown = "<br>".join(f"`{name.rpartition('/')[2]}`" for name in tests)
    return f"| {each.number} | {each.binds.value} | {each.summary} | {shown} |\n"


if __name__ == "__main__":
    from tests.stomp import normative  # the module that the tests import, which has their marks

    print(normative.page(), end="")
