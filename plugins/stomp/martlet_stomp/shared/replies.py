"""Replies between STOMP clients and clients of other protocols (see `requests.py`)."""

from functools import partial

from martlet.access import NO_CORRELATION, Gate, is_uncorrelated
from martlet.errors import Reason, Refused
from martlet.message import CORRELATION_ID, KEYS, Message, Placed, decode_properties, encode_properties
from martlet.records.compression import CompressionError, decompress
from martlet.records.reserved import RESERVED
from martlet_stomp.mapping.destinations import Kind, check_name, parse_destination
from martlet_stomp.mapping.messages import Template
from martlet_stomp.mapping.requests import address_of, requester_of
from martlet_stomp.shared.context import PROTOCOL, Context
from martlet_stomp.shared.storing import find_queue_id
from martlet_stomp.shared.temporary import is_temporary
from martlet_stomp.wire.errors import StompError, shown

__all__ = ["send_reply", "take_replies"]

# Properties with a meaning for brokers that a reply keeps in its message.
KEPT = frozenset((KEYS, "CONTENT_TYPE"))


def send_reply(context: Context, gate: Gate, template: Template, body: bytes, reply_to: str, host: bytes) -> int:
    """Send a message for ``/reply/...`` to the client of another protocol that waits for it.

    Returns the log position to pass to `Peer.hold_until`; 0 if that client no longer waits.

    Args:
      reply_to: as for `Template.record_of`.

    Raises:
      Refused: the client may not reply, or the reply cannot be stored.
      StompError: the message is no reply.
    """
    text, address = shown(template.destination.text), address_of(template.destination.name)
    now_ms = context.broker.clock.now_ms()
    content, properties = template.record_of(body, now_ms, reply_to)
    if not template.correlation and not is_uncorrelated(address):
        raise StompError(f"the message to {text} has no correlation-id; send that of the request")
    if len(content) != len(body):
        raise StompError(f"the message to {text} has too long headers for a reply; shorten them")
    found = {**decode_properties(properties), CORRELATION_ID: template.correlation or NO_CORRELATION}
    try:
        return gate.reply(address, Message("", body, encode_properties(found), 0, 0, 0, now_ms, host)).end
    except Refused as refused:
        if refused.reason is Reason.NOT_FOUND:
            context.temporary.unanswered += 1
            return 0
        raise


def take_replies(context: Context) -> None:
    """Register the plugin for replies of other protocols' clients to STOMP clients."""
    context.broker.replies.add(PROTOCOL, partial(_take, context))


def _take(context: Context, gate: Gate, address: str, reply: Message) -> Placed:
    """Send *reply* to the destination in *address*, as a message of the client that replies."""
    text, is_correlated = requester_of(address)
    found = decode_properties(reply.properties)
    kept = {name: value for name, value in found.items() if name in KEPT or name not in RESERVED}
    if is_correlated and found.get(CORRELATION_ID):
        kept[CORRELATION_ID] = found[CORRELATION_ID]
    try:
        destination = parse_destination(text, context.names)
        check_name(destination)
        context.temporary.check(destination)
        if destination.kind is Kind.REPLY:
            raise StompError(f"the reply for {shown(text)} is one for another client; answer that one")
        context.check_exists(destination, gate, "publish")
        topic, tag = destination.topic, destination.name
        if is_temporary(destination.kind):
            topic, tag = context.temporary.topic, context.temporary.tag_of(destination) or ""
            if not tag:
                raise Refused(Reason.NOT_FOUND, f"the client with {shown(text)} is gone")
        body = decompress(reply.body, reply.sys_flag, context.broker.delivered_bytes_max)
        properties = encode_properties(kept | ({"TAGS": tag} if tag else {}))
    except (StompError, CompressionError, ValueError) as error:
        raise Refused(Reason.ILLEGAL, f"the reply cannot be sent; {error}") from error
    queue_id = find_queue_id(context, gate, topic, tag)
    return gate.publish(Message(topic, body, properties, queue_id, reply.flag, 0, reply.born_ms, reply.born_host))
