"""Selectors: conditions in SQL92 on the headers of messages, as the header ``selector`` of SUBSCRIBE has them.

They are compiled by the plugin that knows the language, and are about the properties of records (`messages.py`). So the
names of headers that have another name there are translated, and so are those that JMS gives to some of them.
"""

import re
from typing import Final

from martlet.broker import Broker
from martlet.delivery.selection import EVERYTHING, Selection
from martlet.message import CORRELATION_ID

__all__ = ["not_from", "select", "translated"]

LANGUAGE: Final = "SQL92"
_NAMES: Final = {
    "JMSCorrelationID": CORRELATION_ID,
    "JMSExpiration": "EXPIRES_MS",
    "JMSPriority": "priority",
    "JMSReplyTo": "STOMP_REPLY_TO",
    "JMSType": "type",
    "content-type": "CONTENT_TYPE",
    "correlation-id": CORRELATION_ID,
    "expires": "EXPIRES_MS",
    "reply-to": "STOMP_REPLY_TO",
}
# A string, a name in quotes, or a plain name.
_TOKEN: Final = re.compile(r"""'(?:[^']|'')*'|"((?:[^"]|"")*)"|([A-Za-z_$][A-Za-z0-9_$]*)""")


def translated(selector: str) -> str:
    """Return *selector* with the names of properties instead of those of headers."""

    def name_of(match: re.Match[str]) -> str:
        return _NAMES.get(match[1] or match[2] or "", match[0])

    return _TOKEN.sub(name_of, selector)


def select(broker: Broker, selector: str | None) -> Selection:
    """Return the selection of messages with *selector*. Raises `Refused` if it cannot be compiled."""
    return broker.selection(LANGUAGE, translated(selector)) if selector and selector.strip() else EVERYTHING


def not_from(host: bytes) -> Selection:
    """Return the selection of messages that the connection from *host* did not send, as records hold it."""
    return Selection(f"not from {host.hex()}", None, lambda record: record.born_host != host)
