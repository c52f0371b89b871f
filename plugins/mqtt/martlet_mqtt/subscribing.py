"""Subscriptions as a session stores them: one byte of options, and the subscription identifier."""

from .frames import Grant
from .packets import Subscription
from .properties import decode_varint, encode_varint

__all__ = ["grant_of", "options_of"]


def options_of(grant: Grant) -> bytes:
    """Return what a session stores with the filter of *grant*."""
    each = grant.subscription
    options = each.qos | each.no_local << 2 | each.retain_as_published << 3 | each.retain_handling << 4
    return bytes((options,)) + (encode_varint(grant.identifier) if grant.identifier else b"")


def grant_of(topic_filter: str, stored: bytes) -> Grant:
    """Return the grant that `options_of` stored."""
    options = stored[0]
    each = Subscription(topic_filter, options & 3, bool(options & 4), bool(options & 8), options >> 4 & 3)
    return Grant(each, decode_varint(stored, 1)[0] if len(stored) > 1 else 0)
