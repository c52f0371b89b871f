"""Conversion of frames to events: required headers, and the meaning of headers; pure functions."""

import re
from collections.abc import Callable, Mapping
from typing import Final

from martlet_stomp.wire.arguments import check_flag, check_subscribe_arguments
from martlet_stomp.wire.codec import Head, escape
from martlet_stomp.wire.errors import StompError, UnknownVersion, shown
from martlet_stomp.wire.packets import (
    Abort,
    AckMode,
    AckPlace,
    AckRun,
    Begin,
    Commit,
    Connect,
    Disconnect,
    Event,
    Nack,
    Subscribe,
    Unsubscribe,
    Version,
)

__all__ = ["OF_FRAME", "connect_of", "event_of", "receipt_of", "supported_versions"]

Headers = Mapping[str, str]

_NUMBER: Final = re.compile(r"[0-9]{1,9}\Z")
_PLACE: Final = re.compile(r"([0-9]{1,9})-([0-9]{1,5})-([0-9]{1,18})\Z")
_BEATS: Final = re.compile(r" *([0-9]{1,18}) *, *([0-9]{1,18}) *\Z")
# Longest interval of heart-beats, 24 days; a longer one means none.
BEAT_MS_MAX: Final = 0x7FFF_FFFF
_VERSIONS: Final = {version.text: version for version in Version}
_ACK_MODES: Final = {
    "auto": AckMode.AUTO,
    "client": AckMode.CLIENT,
    "client-individual": AckMode.CLIENT_INDIVIDUAL,
}
_EXCLUSIVE: Final = ("activemq.exclusive", "exclusive", "x-single-active-consumer")
# Headers of the frame, not of the message in it.
OF_FRAME: Final = frozenset(("destination", "content-length", "receipt", "transaction"))


def supported_versions() -> str:
    """Return the broker's versions in the form of ``accept-version``."""
    return ",".join(version.text for version in Version)


def receipt_of(headers: Headers, version: Version) -> bytes | None:
    """Return the receipt that a frame with *headers* asks for."""
    receipt = headers.get("receipt")
    return None if receipt is None else escape(receipt, version)


def connect_of(headers: Headers) -> Connect:
    """Return the event of CONNECT with *headers*, which have no escapes. Raises `StompError`."""
    version = Version.V1_0
    accepted = headers.get("accept-version")
    if accepted is None:
        headers = {name.strip(): value.strip() for name, value in headers.items()}
    else:
        common = [_VERSIONS[each.strip()] for each in accepted.split(",") if each.strip() in _VERSIONS]
        if not common:
            text = f"accept-version is {shown(accepted)}; supported versions are {supported_versions()}"
            raise UnknownVersion(text)
        version = max(common)
    beats = (0, 0) if version is Version.V1_0 else _beats(headers.get("heart-beat", "0,0"))
    return Connect(
        version,
        headers.get("login"),
        headers.get("passcode"),
        beats[0],
        beats[1],
        headers.get("client-id"),
        headers,
    )


def _beats(text: str) -> tuple[int, int]:
    found = _BEATS.match(text)
    if found is None:
        raise StompError(f"heart-beat {shown(text)} is not two numbers of milliseconds with a comma between them")
    return min(int(found[1]), BEAT_MS_MAX), min(int(found[2]), BEAT_MS_MAX)


def event_of(head: Head, version: Version) -> Event:
    """Return the event of a frame other than CONNECT and SEND. Raises `StompError`."""
    return _EVENTS[head.command](head.headers, version)


def _subscribe(headers: Headers, version: Version) -> Subscribe:
    check_subscribe_arguments(headers)
    mode = headers.get("ack", "auto")
    ack = _ACK_MODES.get(mode)
    if ack is None:
        raise StompError(f"ack {shown(mode)} of SUBSCRIBE is not one of {', '.join(_ACK_MODES)}")
    destination = _required(headers, "destination", "SUBSCRIBE")
    prefetch = headers.get("activemq.prefetchSize", headers.get("prefetch-count"))
    if prefetch is not None and _NUMBER.match(prefetch) is None:
        raise StompError(f"prefetch {shown(prefetch)} of SUBSCRIBE is not a number of messages")
    durable_name, is_durable = _durable(headers)
    return Subscribe(
        destination,
        headers.get("id") if version is Version.V1_0 else _required(headers, "id", "SUBSCRIBE"),
        ack,
        headers.get("selector"),
        None if prefetch is None else int(prefetch),
        durable_name,
        is_durable,
        _flag(headers, "auto-delete") if "auto-delete" in headers else None,
        any(_flag(headers, name) for name in _EXCLUSIVE),
        _flag(headers, "browser"),
        _flag(headers, "activemq.noLocal") or _flag(headers, "no-local"),
        _flag(headers, "activemq.retroactive"),
        receipt_of(headers, version),
    )


def _durable(headers: Headers) -> tuple[str | None, bool]:
    """Return ActiveMQ's name of a durable subscription, and whether ``id`` is the name, as with RabbitMQ."""
    name = headers.get("activemq.subscriptionName", headers.get("activemq.subcriptionName"))
    return name, _flag(headers, "durable")


def _flag(headers: Headers, name: str) -> bool:
    return headers.get(name, "").strip().lower() == "true"


def _unsubscribe(headers: Headers, version: Version) -> Unsubscribe:
    check_flag("UNSUBSCRIBE", "durable", headers.get("durable", "false"))
    durable_name, is_durable = _durable(headers)
    subscription_id = headers.get("id")
    if subscription_id is None and (version is not Version.V1_0 or "destination" not in headers):
        _required(headers, "id", "UNSUBSCRIBE")
    return Unsubscribe(
        subscription_id, headers.get("destination"), durable_name, is_durable, receipt_of(headers, version)
    )


def _ack(headers: Headers, version: Version) -> AckRun:
    place = _place(headers, version, "ACK")
    receipt = receipt_of(headers, version)
    return AckRun(
        [place.subscription],
        [place.queue_id],
        [place.offset],
        () if receipt is None else [receipt],
        () if receipt is None else [0],
        headers.get("transaction"),
    )


def _nack(headers: Headers, version: Version) -> Nack:
    return Nack(
        _place(headers, version, "NACK"),
        headers.get("transaction"),
        headers.get("requeue", "true").lower() != "false",
        receipt_of(headers, version),
    )


def _place(headers: Headers, version: Version, command: str) -> AckPlace:
    """Return the place in ``id``, or before STOMP 1.2 in ``message-id``.

    The place includes the subscription's number, so the header ``subscription``, which 1.1 requires, may be missing.
    """
    text = _required(headers, "id" if version is Version.V1_2 else "message-id", command)
    found = _PLACE.match(text)
    if found is None:
        raise StompError(f"{command} is for message {shown(text)}, which this connection did not receive")
    return AckPlace(int(found[1]), int(found[2]), int(found[3]))


def _begin(headers: Headers, version: Version) -> Begin:
    return Begin(_required(headers, "transaction", "BEGIN"), receipt_of(headers, version))


def _commit(headers: Headers, version: Version) -> Commit:
    return Commit(_required(headers, "transaction", "COMMIT"), receipt_of(headers, version))


def _abort(headers: Headers, version: Version) -> Abort:
    return Abort(_required(headers, "transaction", "ABORT"), receipt_of(headers, version))


def _disconnect(headers: Headers, version: Version) -> Disconnect:
    return Disconnect(receipt_of(headers, version))


def _required(headers: Headers, name: str, command: str) -> str:
    value = headers.get(name)
    if not value:
        raise StompError(f"{command} has no header {name!r}; it is required")
    return value


_EVENTS: Final[dict[str, Callable[[Headers, Version], Event]]] = {
    "SUBSCRIBE": _subscribe,
    "UNSUBSCRIBE": _unsubscribe,
    "ACK": _ack,
    "NACK": _nack,
    "BEGIN": _begin,
    "COMMIT": _commit,
    "ABORT": _abort,
    "DISCONNECT": _disconnect,
}
