"""Requests and replies across protocols; pure functions.

A message with ``reply-to`` has, besides the destination in ``STOMP_REPLY_TO``, the properties with which clients of
RocketMQ answer each other. The address in REPLY_TO_CLIENT is ``stomp:KIND:DESTINATION``; KIND says whether the request
has a correlation id (``text``) or not (``none``). The other way, a request of another protocol has the ``reply-to``
``/reply/ADDRESS``, with its REPLY_TO_CLIENT in percent encoding.
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
# RocketMQ's clients copy it; how long the requester waits is not known.
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
    """Return the destination for a reply to ``stomp:`` and *address*, and whether it has the correlation id."""
    kind, _, destination = address.partition(":")
    return destination, kind == "text"


def reply_to_of(found: Mapping[str, str], named: str) -> str | None:
    """Return the ``reply-to`` of the message whose record has the properties *found*; None if it has none.

    Args:
      named: as for `messages.arrived_from`.
    """
    if DESTINATION in found:
        return found[DESTINATION]
    if found.get(REPLY_TO) and found.get(CORRELATION_ID):
        return Kind.REPLY.value + quote(found[REPLY_TO], safe="@:.")
    return f"{Kind.TOPIC.value}{named}/{found['REPLY_TO']}" if named and "REPLY_TO" in found else None


def correlation_of(found: Mapping[str, str]) -> str | None:
    """Return the ``correlation-id`` of the message whose record has the properties *found*."""
    value = found.get(CORRELATION_ID)
    return None if value == NO_CORRELATION and is_uncorrelated(found.get(REPLY_TO, "")) else value


def address_of(name: str) -> str:
    """Return the address to which a message for ``/reply/`` and *name* goes."""
    return unquote(name)
