"""Constant parts of answers and records: the broker's address, fixed parts of answers and properties."""

from typing import Final, final

from martlet.runtime.native import native
from martlet_remoting.handlers.usual_items import usual_items
from martlet_remoting.wire.codec import (
    ack_response_template,
    pop_response_template,
    pull_response_template,
    send_response_template,
)
from martlet_remoting.wire.sends import sent_answers

__all__ = ["Templates"]


@final
class Templates:
    """The fixed parts of frequent answers and of stored properties, and the functions that fill them in for runs."""

    def __init__(self, store_host: bytes, cluster: str, region: str, *, trace: bool) -> None:
        tracing = str(trace).lower()
        self.pulled: Final = pull_response_template()
        self.popped: Final = pop_response_template()
        self.acknowledged: Final = ack_response_template()
        self.sent: Final = send_response_template(region, trace)
        self.usual_items: Final = native(usual_items)
        self.sent_answers: Final = native(sent_answers)
        # Header fields of every answer to a send, including refusals.
        self.send_ext: Final = {"TRACE_ON": tracing, "MSG_REGION": region}
        self.stamp: Final = f"CLUSTER\x01{cluster}\x02MSG_REGION\x01{region}\x02TRACE_ON\x01{tracing}\x02".encode()
        # For properties without the separator at the end.
        self.stamp_after: Final = b"\x02" + self.stamp
        self.set_store_host(store_host)

    def set_store_host(self, host: bytes) -> None:
        """Set this broker's address, in the format of records."""
        self.store_host = host
        self.host_text = host.hex().upper()
        self.sent_usual = _usual_template(self.sent, self.host_text)

    def message_id(self, position: int) -> str:
        """Return the offset message id of the record at *position*: the advertised address, then the position."""
        return f"{self.host_text}{position:016X}"


def _usual_template(template: str, host_text: str) -> bytes:
    """Return *template* for the usual answer: code 0, one message with a unique key that needs no escaping."""
    for old, new in (('"code":%d', '"code":0'), ('%s"msgId":"%s"', f'"transactionId":"%s","msgId":"{host_text}%016X"')):
        assert old in template
        template = template.replace(old, new)
    return template.encode()
