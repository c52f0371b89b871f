"""Selectors: conditions in SQL92 on the headers of messages, from the header ``selector`` of SUBSCRIBE.

The plugin for the language compiles a selector, which tests the properties of records (`messages.py`). So names of
headers and JMS names are translated to names of properties. Values that are not in a property, such as the message's
time, are computed for the selectors that use them.
"""

import re
from collections.abc import Callable
from typing import Final, cast, final

from martlet.broker import Broker
from martlet.contracts import Condition, Predicate, RecordView
from martlet.delivery.routing.selection import EVERYTHING, Selection
from martlet.message import CORRELATION_ID
from martlet_stomp.wire.errors import StompError

__all__ = ["not_from", "select", "translated"]

LANGUAGE: Final = "SQL92"
_NAMES: Final = {
    "JMSCorrelationID": CORRELATION_ID,
    "JMSReplyTo": "STOMP_REPLY_TO",
    "JMSType": "type",
    "content-type": "CONTENT_TYPE",
    "correlation-id": CORRELATION_ID,
    "expires": "EXPIRES_MS",
    "message-id": "JMSMessageID",
    "reply-to": "STOMP_REPLY_TO",
    "timestamp": "JMSTimestamp",
}
# As in ActiveMQ, a message without the header has the priority 4, never expires, and is not persistent.
_COMPUTED: Final[dict[str, Callable[[RecordView], str]]] = {
    "JMSDeliveryMode": lambda record: "PERSISTENT" if record.property("persistent") == "true" else "NON_PERSISTENT",
    "JMSExpiration": lambda record: record.property("EXPIRES_MS") or "0",
    "JMSMessageID": lambda record: f"{record.topic}-{record.queue_id}-{record.queue_offset}",
    "JMSPriority": lambda record: record.property("priority") or "4",
    "JMSTimestamp": lambda record: record.property("timestamp") or str(record.born_ms),
}
# Values that the broker knows only at delivery, or never.
_UNKNOWN: Final = frozenset(
    (
        "JMSDestination",
        "JMSRedelivered",
        "JMSXConsumerTXID",
        "JMSXDeliveryCount",
        "JMSXProducerTXID",
        "JMSXRcvTimestamp",
        "JMSXState",
        "JMSXUserID",
        "content-length",
        "delivery-count",
        "destination",
        "redelivered",
        "subscription",
    )
)
# A string, a name in quotes, or a plain name.
_TOKEN: Final = re.compile(r"""'(?:[^']|'')*'|"((?:[^"]|"")*)"|([A-Za-z_$][A-Za-z0-9_$]*)""")


@final
class _Headers:
    """A view of a record that includes the computed values."""

    __slots__ = ("_record",)

    def __init__(self, record: RecordView) -> None:
        self._record = record

    def property(self, name: str) -> str | None:
        compute = _COMPUTED.get(name)
        return self._record.property(name) if compute is None else compute(self._record)


def translated(selector: str) -> str:
    """Return *selector* with names of properties instead of names of headers.

    Raises `StompError` if it uses a name whose value is unknown at selection.
    """

    def name_of(match: re.Match[str]) -> str:
        name = match[1] or match[2] or ""
        if name in _UNKNOWN:
            names = ", ".join(sorted({*_COMPUTED, *(each for each in _NAMES if each.startswith("JMS"))}))
            raise StompError(f"selector asks for {name}, which cannot be selected by; use {names}, or headers of SEND")
        return _NAMES.get(name, match[0])

    return _TOKEN.sub(name_of, selector)


def select(broker: Broker, selector: str | None) -> Selection:
    """Return the selection of messages with *selector*.

    Raises `Refused` if *selector* cannot be compiled, and `StompError` as `translated`.
    """
    if not selector or not selector.strip():
        return EVERYTHING
    text = translated(selector)
    plain = broker.selection(LANGUAGE, text)
    if plain.predicate is None or not any((match[1] or match[2]) in _COMPUTED for match in _TOKEN.finditer(text)):
        return plain
    return Selection(f"stomp {plain.name}", plain.codes, _with_computed(plain.predicate))


def _with_computed(predicate: Predicate) -> Predicate:
    """Return *predicate* applied to the properties and the computed values of a record."""

    def holds(record: RecordView) -> bool:
        return predicate(cast(RecordView, _Headers(record)))

    # No `Condition.find`: computed values are not among the bytes of the record.
    return Condition(holds, predicate.cost, None, predicate.steps) if isinstance(predicate, Condition) else holds


def not_from(host: bytes) -> Selection:
    """Return the selection of messages that were not sent by the connection from *host*, encoded as in a record."""
    return Selection(f"not from {host.hex()}", None, lambda record: record.born_host != host)
