"""The encoding of subscriptions in a session.

It consists of one byte of options, the subscription identifier, the retained messages still to be sent (`Rest`), and
the selector.
"""

from struct import Struct
from typing import Final, NamedTuple

from martlet_mqtt.mapping.frames import Grant
from martlet_mqtt.wire.packets import FilterSubscription
from martlet_mqtt.wire.properties import decode_varint, encode_varint

__all__ = ["SELECTS", "Rest", "grant_of", "options_of", "rest_of"]

# Flags in the options: there is a selector, and retained messages are due.
SELECTS: Final = 0x40
IS_DUE: Final = 0x80
POSITIONS: Final = Struct(">QQQ")


class Rest(NamedTuple):
    """The retained messages still to be sent for a subscription, in two parts.

    First the messages published after log position ``start`` and up to ``end``, of names after ``name``; then the
    messages published up to ``last``, of all names.
    """

    start: int
    end: int
    last: int
    name: str = ""


def options_of(grant: Grant, rest: Rest | None = None) -> bytes:
    """Return the encoding of *grant* for the session, with *rest*, the retained messages still to be sent."""
    each = grant.subscription
    options = each.qos | each.no_local << 2 | each.retain_as_published << 3 | each.retain_handling << 4
    if not grant.selector and rest is None:
        return bytes((options,)) + (encode_varint(grant.identifier) if grant.identifier else b"")
    due = b""
    if rest is not None:
        options |= IS_DUE
        due = POSITIONS.pack(rest.start + 1, rest.end, rest.last) + rest.name.encode()
        due = encode_varint(len(due)) + due
    options |= SELECTS if grant.selector else 0
    return bytes((options,)) + encode_varint(grant.identifier) + due + grant.selector.encode()


def grant_of(topic_filter: str, stored: bytes) -> Grant:
    """Return the grant in *stored*, from `options_of`."""
    options = stored[0]
    each = FilterSubscription(topic_filter, options & 3, bool(options & 4), bool(options & 8), options >> 4 & 3)
    identifier, at = decode_varint(stored, 1) if len(stored) > 1 else (0, 1)
    if options & IS_DUE:
        size, at = decode_varint(stored, at)
        at += size
    return Grant(each, identifier, stored[at:].decode() if options & SELECTS else "")


def rest_of(stored: bytes) -> Rest | None:
    """Return the retained messages still to be sent for a *stored* subscription; None if there are none."""
    if not stored or not stored[0] & IS_DUE:
        return None
    size, at = decode_varint(stored, decode_varint(stored, 1)[1])
    start, end, last = POSITIONS.unpack_from(stored, at)
    return Rest(start - 1, end, last, stored[at + POSITIONS.size : at + size].decode())
