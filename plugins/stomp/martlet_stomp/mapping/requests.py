"""Requests and replies across protocols; pure functions.

The record of a message with ``reply-to`` has the destination in ``STOMP_REPLY_TO``, and the properties with which
RocketMQ's clients answer each other. REPLY_TO_CLIENT is the address ``stomp:KIND:DESTINATION``; KIND is ``text`` if the
request has a correlation id, and ``none`` if not. A STOMP client gets a request of another protocol with the
``reply-to`` ``/reply/ADDRESS``: ADDRESS is REPLY_TO_CLIENT in percent encoding.
"""

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from martlet.access import NO_CORRELATION, is_uncorrelated
from martlet.message import CORRELATION_ID, REPLY_TO
from martlet_stomp.mapping.destinations import Kind

__all__ = [
    "DESTINATION",
    "address_of",
    "correlation_of",
    "reply_to_of",
    "request_of",
    "requester_of",
]

DESTINATION: Final = "STOMP_REPLY_TO"
SCHEME: Final = "stomp:"
# Copied into replies by RocketMQ's clients. A fixed time, because STOMP does not tell how long a requester waits.
TTL_MS: Final = 86_400_000


def request_of(destination: str, correlation: str, cluster: str) -> dict[str, str]:
    """Return the properties of a message with the reply-to *destination*; *correlation* is empty for none."""
    address = f"{SCHEME}{'text' if correlation else 'none'}:{destination}"
    return {
        DESTINATION: destination,
        REPLY_TO: address,
        CORRELATION_ID: correlation or NO_CORRELATION,
        "CLUSTER": cluster,
        "TTL": str(TTL_MS),
    }


def requester_of(address: str) -> tuple[str, bool]:
    """Return the destination for a reply to *address*, which lacks its ``stomp:``, and whether it has an id."""
    kind, _, destination = address.partition(":")
    return destination, kind == "text"


def reply_to_of(found: Mapping[str, str], named: str) -> str | None:
    """Return the ``reply-to`` of a message whose record has the properties *found*; None if it has none.

    Args:
      named: as for `messages.arrived_from`.
    """
    if DESTINATION in found:
        return found[DESTINATION]
    if found.get(REPLY_TO) and found.get(CORRELATION_ID):
        return Kind.REPLY.value + quote(found[REPLY_TO], safe="@:.")
    return f"{Kind.TOPIC.value}{named}/{found['REPLY_TO']}" if named and "REPLY_TO" in found else None


def correlation_of(found: Mapping[str, str]) -> str | None:
    """Return the ``correlation-id`` of a message whose record has the properties *found*."""
    value = found.get(CORRELATION_ID)
    return None if value == NO_CORRELATION and is_uncorrelated(found.get(REPLY_TO, "")) else value


def address_of(name: str) -> str:
    """Return the requester's address in *name*, the text after ``/reply/``."""
    return unquote(name)
