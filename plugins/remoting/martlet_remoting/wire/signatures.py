"""Signed requests: the fields that RocketMQ's AclClientRPCHook adds to each request, and the signed content.

RocketMQ acl AclClientRPCHook, AclUtils.combineRequestContent, PlainAccessResource.parse (4.9.8);
auth DefaultAuthenticationContextBuilder.build (5.5.0).
"""

import hmac
from base64 import b64encode
from collections.abc import Mapping
from typing import Final, final

from msgspec import Struct

from martlet_remoting.wire.codes import VERSION_4_9_3
from martlet_remoting.wire.packets import Command, ext_text

__all__ = ["ACCESS_KEY", "SIGNATURE", "TOKEN", "SigningKey", "signed_content"]

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
TOKEN: Final = "SecurityToken"
# Clients up to 4.9.3 add this field after signing (MixAll.UNIQUE_MSG_QUERY_FLAG).
UNIQUE_KEY: Final = "_UNIQUE_KEY_QUERY"


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
        mac = hmac.digest(self.secret.encode(), signed_content(Command(code, fields, body)), "sha1")
        return {**fields, SIGNATURE: b64encode(mac).decode()}


def signed_content(command: Command) -> bytes:
    """Return the bytes that a client signs: the values of the header fields, sorted by name, then the body."""
    unsigned = (SIGNATURE, UNIQUE_KEY) if command.version <= VERSION_4_9_3 else (SIGNATURE,)
    fields = sorted(command.ext.items())
    values = "".join([ext_text(value) for name, value in fields if name not in unsigned and value is not None])
    return values.encode() + command.body
