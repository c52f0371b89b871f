"""Subscriptions as a session stores them: one byte of options, the subscription identifier, and the selector."""

from typing import Final

from .frames import Grant
from .packets import Subscription
from .properties import decode_varint, encode_varint

__all__ = ["SELECTS", "grant_of", "options_of"]

# Added to the options if there is a selector.
SELECTS: Final = 0x40


def options_of(grant: Grant) -> bytes:
    """Return what a session stores with the filter of *grant*."""
    each = grant.subscription
    options = each.qos | each.no_local << 2 | each.retain_as_published << 3 | each.retain_handling << 4
    if not grant.selector:
        return bytes((options,)) + (encode_varint(grant.identifier) if grant.identifier else b"")
    return bytes((options | SELECTS,)) + encode_varint(grant.identifier) + grant.selector.encode()


def grant_of(topic_filter: str, stored: bytes) -> Grant:
    """Return the grant that `options_of` stored."""
    options = stored[0]
    each = Subscription(topic_filter, options & 3, bool(options & 4), bool(options & 8), options >> 4 & 3)
    identifier, at = decode_varint(stored, 1) if len(stored) > 1 else (0, 1)
    return Grant(each, identifier, stored[at:].decode() if options & SELECTS else "")
