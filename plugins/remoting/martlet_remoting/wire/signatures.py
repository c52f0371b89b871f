"""Signed requests: the fields that RocketMQ's AclClientRPCHook adds to each request, and the signed content.

RocketMQ acl AclClientRPCHook, AclUtils.combineRequestContent, PlainAccessResource.parse (4.9.8);
auth DefaultAuthenticationContextBuilder.build (5.5.0).
"""

import hmac
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

from msgspec import Raw, Struct, defstruct
from msgspec.json import Decoder

from martlet.runtime.steps import Steps, per_slice
from martlet_remoting.wire.codes import VERSION, VERSION_4_9_3, RequestCode
from martlet_remoting.wire.packets import Command, ext_text

__all__ = [
    "ACCESS_KEY",
    "SIGNATURE",
    "SIGNED_ACK",
    "SIGNED_BY_CODE",
    "SIGNED_END",
    "SIGNED_SEND",
    "TOKEN",
    "TOKEN_PLACE",
    "SignedFields",
    "SigningKey",
    "is_signed",
    "sign_in_slices",
    "signed_contents",
    "signed_values",
]

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
TOKEN: Final = "SecurityToken"
ACCESS_KEY_BYTES: Final = ACCESS_KEY.encode()
# Clients up to 4.9.3 add this field after signing (MixAll.UNIQUE_MSG_QUERY_FLAG).
UNIQUE_KEY: Final = "_UNIQUE_KEY_QUERY"
# Of a body that is hashed in one slice; SHA-1 takes 0.5 to 2 ms for a MiB.
SLICE_BYTES: Final = per_slice(2000.0 / (1 << 20))


@final
class SigningKey(Struct, frozen=True):
    """The key with which a client signs its requests: *access_key* is its name, the broker knows the *secret* too.

    Raises:
      ValueError: one of the keys is empty or cannot be encoded as UTF-8.
    """

    access_key: str
    secret: str

    def __repr__(self) -> str:
        return f"SigningKey(access_key={self.access_key!r})"

    def __post_init__(self) -> None:
        if not self.access_key:
            raise ValueError("access key '' is empty; give the name of a user of the broker")
        if not self.secret:
            raise ValueError(f"secret of access key {self.access_key!r} is empty; give the user's secret")
        for what, text in ("access key", self.access_key), ("secret of access key", self.secret):
            if text.encode("utf-8", "replace").decode() != text:
                raise ValueError(f"{what} {self.access_key!r} contains half of a surrogate pair; decode it as UTF-8")

    def sign(self, code: int, ext: Mapping[str, object], body: bytes) -> dict[str, object]:
        """Return *ext* with the access key and the signature of the request."""
        fields = {**ext, ACCESS_KEY: self.access_key}
        mac = hmac.digest(self.secret.encode(), signed_values(fields, VERSION) + body, "sha1")
        return {**fields, SIGNATURE: b64encode(mac).decode()}


def sign_in_slices(key: SigningKey, ext: Mapping[str, object], body: Sequence[bytes]) -> Steps[dict[str, object]]:
    """As `SigningKey.sign`, for a long body in parts, which are not copied."""
    fields = {**ext, ACCESS_KEY: key.access_key}
    mac, left = hmac.new(key.secret.encode(), signed_values(fields, VERSION), "sha1"), SLICE_BYTES
    for part in body:
        for start in range(0, len(part), SLICE_BYTES):
            piece = memoryview(part)[start : start + SLICE_BYTES]
            mac.update(piece)
            left -= len(piece)
            if left <= 0:
                left = SLICE_BYTES
                yield
    return {**fields, SIGNATURE: b64encode(mac.digest()).decode()}


@final
class SignedFields:
    """Decodes the fields of one kind of requests as texts, in the order of their names.

    The signature is the last field, the access key the first. A missing field is empty, which signs the same. The
    decoders raise `ValueError` unless all fields are texts and have one of *names*. If a name comes twice, the last
    value counts, as in other decoders.
    """

    def __init__(self, *names: str) -> None:
        in_order = (ACCESS_KEY, TOKEN, *sorted(names), SIGNATURE)
        fields = defstruct("Fields", [(name, str, "") for name in in_order], forbid_unknown_fields=True, gc=False)
        self.decode: Final[Callable[[bytes | Raw], Any]] = Decoder(fields).decode
        # Decodes a whole JSON header, with the fields in ``extFields``.
        self.decode_header: Final[Callable[[bytes], Any]] = Decoder(
            defstruct("Header", [("extFields", fields)], gc=False)
        ).decode


TOKEN_PLACE: Final = 1  # in the fields
SIGNED_SEND: Final = SignedFields(*"abcdefghijklmn")
SIGNED_END: Final = SignedFields(
    *("bname", "commitLogOffset", "commitOrRollback", "fromTransactionCheck", "msgId", "producerGroup"),
    *("topic", "tranStateTableOffset", "transactionId"),
)
SIGNED_ACK: Final = SignedFields(
    *("bname", "consumerGroup", "extraInfo", "invisibleTime", "offset", "queueId", "topic"),
)
# The requests whose fields their handlers decode as records.
SIGNED_BY_CODE: Final[Mapping[int, SignedFields]] = {
    RequestCode.SEND_MESSAGE_V2: SIGNED_SEND,
    RequestCode.ACK_MESSAGE: SIGNED_ACK,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: SIGNED_ACK,
    RequestCode.PULL_MESSAGE: SignedFields(
        *("bname", "commitOffset", "consumerGroup", "expressionType", "maxMsgBytes", "maxMsgNums", "queueId"),
        *("queueOffset", "requestSource", "subVersion", "subscription", "suspendTimeoutMillis", "sysFlag", "topic"),
    ),
    RequestCode.POP_MESSAGE: SignedFields(
        *("attemptId", "bname", "bornTime", "consumerGroup", "exp", "expType", "initMode", "invisibleTime"),
        *("maxMsgNums", "order", "pollTime", "queueId", "topic"),
    ),
}


class _AccessKey(Struct, gc=False, rename={"value": ACCESS_KEY}):
    """The access key among other fields, which are skipped."""

    value: object = None


_decode_access_key: Final = Decoder(_AccessKey).decode


def is_signed(command: Command) -> bool:
    """Return whether *command* has an access key; this decodes few of the fields."""
    if command.raw is not None:
        fields = bytes(command.raw)
        # JSON may write any letter of a name as an escape. `in` is slower: it raises and catches a TypeError first.
        if fields.find(ACCESS_KEY_BYTES) < 0 and fields.find(b"\\") < 0:
            return False
        try:
            return _decode_access_key(fields).value not in ("", None)
        except (ValueError, RecursionError):
            pass
    return command.text(ACCESS_KEY, "") != ""


def signed_values(ext: Mapping[str, object], version: int, without: str = SIGNATURE) -> bytes:
    """Return what a client of *version* signs of the header fields: their values in the order of their names.

    The order is that of Java's strings, by UTF-16 code units. The field *without* is left out, too.
    """
    unsigned = (SIGNATURE, UNIQUE_KEY, without) if version <= VERSION_4_9_3 else (SIGNATURE, without)
    names = sorted(ext)
    if not "".join(names).isascii():
        names.sort(key=_utf16)
    values = [ext[name] for name in names if name not in unsigned]
    texts = [value if type(value) is str else ext_text(value) for value in values if value is not None]
    return "".join(texts).encode()


def signed_contents(command: Command) -> list[bytes]:
    """Return `signed_values` of *command*; if it has a token, also without it, as Go clients sign."""
    values = [signed_values(command.ext, command.version)]
    if command.text(TOKEN, ""):
        values.append(signed_values(command.ext, command.version, TOKEN))
    return values


def _utf16(name: str) -> bytes:
    return name.encode("utf-16-be", "surrogatepass")
