"""Recall handles, with which a client can recall a timed message (RocketMQ RecallMessageHandle.HandleV1).

A handle is not a secret: a message's topic, time and unique key are enough to make one. So a client may recall only
messages of topics to which it may publish.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error

from msgspec import Struct

from martlet.message import find_property

__all__ = ["RecallHandle", "decode_handle", "encode_handle", "handle_of"]

HANDLE_CHARS_MAX = 2048


class RecallHandle(Struct, frozen=True):
    """The handle of the message in *topic* with this unique key, which *broker* delivers after *out_ms*."""

    topic: str
    broker: str
    out_ms: int
    unique: str


def encode_handle(handle: RecallHandle) -> str:
    text = f"v1 {handle.topic} {handle.broker} {handle.out_ms + 1} {handle.unique}"
    return urlsafe_b64encode(text.encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Return the parts of a handle.

    Raises:
      ValueError: the text is no handle.
    """
    try:
        if len(text) > HANDLE_CHARS_MAX:
            raise ValueError
        words = urlsafe_b64decode(text.encode("ascii")).decode().split(" ")
        version, topic, broker, out, unique = words[:5]
        if version != "v1" or not out.isdecimal() or len(out) > 18:
            raise ValueError
        return RecallHandle(topic, broker, int(out) - 1, unique)
    except (ValueError, Error) as error:
        raise ValueError(f"recall handle {text!r:.200} is invalid; use one from the answer to a send") from error


def handle_of(properties: bytes, topic: str, broker: str) -> str:
    """Return the handle of a message for *topic* stored with these *properties*; empty if it is not timed."""
    out = find_property(properties, b"TIMER_OUT_MS")
    if not out.isdigit():
        return ""
    unique = find_property(properties, b"UNIQ_KEY").decode("utf-8", "replace")
    return encode_handle(RecallHandle(topic, broker, int(out), unique))
