"""Conversion between requests of MQTT and of other protocols' clients; pure functions.

The record of an MQTT request, a message with a response topic, has REPLY_TO_CLIENT, CORRELATION_ID, CLUSTER and TTL, so
that RocketMQ's clients answer it as they answer each other. REPLY_TO_CLIENT is the address ``mqtt:KIND:TOPIC`` with the
response topic. KIND is the encoding of the correlation data in CORRELATION_ID: ``text`` if the data is text,
``base64`` if it is not, and ``none`` if the request has none.

An MQTT client gets a RocketMQ client's request with the response topic ``$REPLY/ADDRESS``: ADDRESS is REPLY_TO_CLIENT
in percent encoding.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from martlet.access import NO_CORRELATION, is_uncorrelated
from martlet.message import CORRELATION_ID, REPLY_TO
from martlet_mqtt.wire.errors import MqttError
from martlet_mqtt.wire.names import HIDDEN, WILDCARD, check_name

__all__ = ["REPLIES", "address_of", "correlation_of", "request_of", "requester_of", "response_of"]

REPLIES: Final = "$REPLY/"
SCHEME: Final = "mqtt:"
# Copied into replies by RocketMQ's clients. A fixed time, because MQTT does not tell how long a requester waits.
TTL_MS: Final = 86_400_000


def request_of(response: str, correlation: bytes | None, text: str | None, cluster: str) -> dict[str, str]:
    """Return the properties of a request with the topic *response*; *text* is *correlation* as text, if it is text."""
    try:
        check_name(response)
    except MqttError:
        return {}
    if response.startswith(HIDDEN):
        return {}
    if correlation is None:
        kind, found = "none", NO_CORRELATION
    elif text:
        kind, found = "text", text
    else:
        kind, found = "base64", b64encode(correlation).decode() or NO_CORRELATION
    address = f"{SCHEME}{kind}:{response}"
    return {REPLY_TO: address, CORRELATION_ID: found, "CLUSTER": cluster, "TTL": str(TTL_MS)}


def requester_of(address: str, correlation_id: str) -> tuple[str, bytes | None]:
    """Return the response topic and the correlation data of a reply to *address*, which lacks its ``mqtt:``."""
    kind, _, topic = address.partition(":")
    return topic, _correlation(kind, correlation_id)


def _correlation(kind: str, correlation_id: str) -> bytes | None:
    if kind == "none":
        return None
    if kind != "base64":
        return correlation_id.encode()
    try:
        return b64decode(correlation_id, validate=True)
    except ValueError:
        return b""


def correlation_of(found: Mapping[str, str]) -> bytes | None:
    """Return the correlation data of a message whose record has the properties *found*."""
    value, address = found.get(CORRELATION_ID), found.get(REPLY_TO, "")
    if value is None or (value == NO_CORRELATION and is_uncorrelated(address)):
        return None
    return _correlation(address.split(":", 2)[1] if address.startswith(SCHEME) else "text", value)


def response_of(found: Mapping[str, str]) -> str | None:
    """Return the response topic of a message whose record has the properties *found*."""
    topic = found.get("REPLY_TO")
    if topic is None and found.get(REPLY_TO) and found.get(CORRELATION_ID):
        return REPLIES + quote(found[REPLY_TO], safe="@:.")
    return None if topic is None or WILDCARD.search(topic) else topic  # [MQTT-3.3.2-14]


def address_of(response: str) -> str:
    """Return the address of the requester from the topic ``$REPLY/...``."""
    return unquote(response.removeprefix(REPLIES))
