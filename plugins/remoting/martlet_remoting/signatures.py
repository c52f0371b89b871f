"""Signed requests: what RocketMQ's AclClientRPCHook adds to each request, and what it signed.

RocketMQ acl AclClientRPCHook, AclUtils.combineRequestContent, PlainAccessResource.parse (4.9.8).
"""

from typing import Final

from martlet.contracts import SignedRequest

from .packets import Command, ext_text

__all__ = ["ACCESS_KEY", "SIGNATURE", "TOKEN", "signed_content", "signed_request"]

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
TOKEN: Final = "SecurityToken"
# Java clients add the second one after they have signed (MixAll.UNIQUE_MSG_QUERY_FLAG).
UNSIGNED: Final = frozenset((SIGNATURE, "_UNIQUE_KEY_QUERY"))


def signed_content(command: Command) -> bytes:
    """Return what a client signs: the values of the header fields in the order of their names, then the body."""
    fields = sorted(command.ext.items())
    values = "".join([ext_text(value) for name, value in fields if name not in UNSIGNED and value is not None])
    return values.encode() + command.body


def signed_request(command: Command) -> SignedRequest | None:
    """Return the credentials in *command*, None when it has no access key."""
    access_key = command.text(ACCESS_KEY, "")
    if not access_key:
        return None
    return SignedRequest(access_key, command.text(SIGNATURE, ""), signed_content(command), command.text(TOKEN, ""))
