"""The messages of a remoting connection: `Command`, and `MessageQueue`, to which many of them refer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

import orjson

from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet_remoting.wire.codes import CLIENT_LANGUAGE, FLAG_ONEWAY, FLAG_RESPONSE, VERSION

if TYPE_CHECKING:
    from msgspec import Raw  # takes 20 ms to import, and reading answers does not need it

    from martlet.contracts import Identity  # Spark tasks need not import it

__all__ = ["Command", "Frame", "MessageQueue", "ext_text"]

NO_EXT: Final[Mapping[str, object]] = {}
I64_MIN: Final = -(1 << 63)
I64_MAX: Final = (1 << 63) - 1

# The bytes of a command; a long one is in pieces, because joining megabytes would block the event loop for 10 ms.
Frame: TypeAlias = bytes | list[bytes]


@final
class MessageQueue(NamedTuple):
    """One queue of a topic on one broker; the order is RocketMQ's (topic, broker name, queue id)."""

    topic: str
    broker_name: str
    queue_id: int


def ext_text(value: object) -> str:
    """Return *value* as a header field's text: booleans as true/false, numbers in decimal."""
    if type(value) is str:
        return value
    if value is True:
        return "true"
    if value is False:
        return "false"
    return str(value)


def _fields(raw: "Raw") -> Mapping[str, object]:
    try:
        fields: object = orjson.loads(memoryview(raw))
    except orjson.JSONDecodeError as error:
        raise RemoteProtocolError(f"header field extFields is not JSON: {error}") from error
    if fields is None:
        return NO_EXT
    if type(fields) is not dict:
        raise RemoteProtocolError("header field extFields is not a JSON object")
    return fields


@final
class Command:
    """A request or, if bit 0 of ``flag`` is set, a response. Bit 1 means that no answer is wanted.

    Most clients send the values of ``ext`` as strings, C++ clients send numbers and booleans; read them with `text`,
    `integer` and `boolean`, which accept all of these. ``raw`` is the JSON of ``ext``, decoded at the first access. The
    most frequent requests are decoded from ``raw`` as records (`martlet_remoting.wire.headers`) and never need ``ext``.
    ``identity`` is the user who signed the command, None if it has no signature. ``unusual`` marks a send that the
    handler did not take as part of a run.
    """

    __slots__ = (
        "_ext",
        "body",
        "code",
        "flag",
        "identity",
        "language",
        "opaque",
        "raw",
        "remark",
        "unusual",
        "version",
    )

    def __init__(
        self,
        code: int,
        ext: Mapping[str, object] = NO_EXT,
        body: bytes = b"",
        opaque: int = 0,
        flag: int = 0,
        remark: str | None = None,
        language: str = CLIENT_LANGUAGE,
        version: int = VERSION,
        raw: "Raw | None" = None,
    ) -> None:
        self.code = code
        self.identity: Identity | None = None
        self.unusual = False
        self._ext = ext
        self.raw = raw
        self.body = body
        self.opaque = opaque
        self.flag = flag
        self.remark = remark
        self.language = language
        self.version = version

    def __repr__(self) -> str:
        kind = "response" if self.is_response else "oneway" if self.is_oneway else "request"
        ext = ", ".join(f"{name}={value!r:.80}" for name, value in self.ext.items())
        return f"<Command {kind} code={self.code} opaque={self.opaque} {{{ext}}} body={len(self.body)} B>"

    @property
    def ext(self) -> Mapping[str, object]:
        """The header fields specific to the command's code (RocketMQ: extFields).

        Raises:
          RemoteProtocolError: the fields are not a JSON object.
        """
        if self.raw is not None:
            self.read_ext()
        return self._ext

    def read_ext(self) -> None:
        """Decode ``ext`` now; raises the same errors."""
        if self.raw is not None:
            self._ext = _fields(self.raw)
            self.raw = None

    def set_ext(self, ext: Mapping[str, object]) -> None:
        """Replace ``ext``."""
        self._ext, self.raw = ext, None

    @property
    def is_response(self) -> bool:
        """Whether this is the answer to a request."""
        return self.flag & FLAG_RESPONSE != 0

    @property
    def is_oneway(self) -> bool:
        """Whether the sender wants no answer, not even an error."""
        return self.flag & FLAG_ONEWAY != 0

    def text(self, name: str, default: str | None = None) -> str:
        """Return the header field *name* as text.

        Raises:
          Refused: the field is missing and there is no default.
        """
        value = self.ext.get(name)
        if type(value) is str:
            return value
        if value is None:
            if default is None:
                raise self._missing(name)
            return default
        return ext_text(value)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return the header field *name* as a signed 64-bit number; an empty field counts as missing.

        Raises:
          Refused: the field is missing and there is no default, or is no such number.
        """
        value = self.ext.get(name)
        if type(value) is str and value:
            try:
                number = int(value)
            except ValueError:
                raise self._no_integer(name, value) from None
        elif type(value) is int:
            number = value
        elif value is None or value == "":
            if default is None:
                raise self._missing(name)
            return default
        else:
            raise self._no_integer(name, value)
        if I64_MIN <= number <= I64_MAX:
            return number
        raise self._no_integer(name, value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return whether the header field *name* is "true", in upper or lower case; *default* without the field."""
        value = self.ext.get(name)
        if value is None:
            return default
        return value is True or (type(value) is str and value.lower() == "true")

    def _missing(self, name: str) -> Refused:
        return Refused(Reason.MALFORMED, f"request {self.code} lacks the header field {name}")

    def _no_integer(self, name: str, value: object) -> Refused:
        return Refused(Reason.MALFORMED, f"header field {name} {value!r:.60} is not a 64-bit integer")
