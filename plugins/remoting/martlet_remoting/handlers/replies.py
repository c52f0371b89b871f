"""SEND_REPLY_MESSAGE: stores the reply to a request message and pushes it to the waiting client.

RocketMQ ReplyMessageProcessor. The requester is found among the producers by the client id in REPLY_TO_CLIENT. If the
id is the address of a client of another protocol, that protocol stores the reply (`martlet.access.replies`).
`take_reply` stores replies from other protocols.
"""

import logging
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final

from martlet.access import Gate
from martlet.broker import Broker
from martlet.errors import Reason, Refused
from martlet.message import REPLY_TO, Message, Placed, find_property, put_properties, put_property
from martlet_remoting.consumers.members import Members
from martlet_remoting.handlers.context import Handle, RequestContext, refuse
from martlet_remoting.handlers.send import make_message, open_topic, stamp
from martlet_remoting.shared.templates import Templates
from martlet_remoting.wire.codec import encode_send_response
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import SendHeader, decode_send_header
from martlet_remoting.wire.packets import Command

__all__ = ["TABLE", "send_reply", "take_reply"]

log = logging.getLogger("martlet.remoting")

# Producer group and default topic of replies from other protocols.
PRODUCER_GROUP: Final = "martlet-replies"
DEFAULT_TOPIC: Final = "TBW102"
REPLY_TOPIC: Final = "{}_REPLY_TOPIC"  # of a cluster


def send_reply(context: RequestContext, command: Command) -> bytes | None:
    """Store the reply, push it to the requester, and answer when the requester has accepted it."""
    state = context.state
    header = decode_send_header(command)
    gate = context.gate(command)
    address = find_property(header.properties.encode(), REPLY_TO.encode()).decode("utf-8", "replace")
    is_own = not state.broker.replies.protocol_of(address)
    topic = open_topic(context, gate.check_publish(header.topic, before_publish=is_own), header)
    properties, unique = stamp(header.properties.encode(), state.templates, state.broker.ids)
    message = make_message(context, header, command.body, properties)
    message.topic = topic.name
    placed = gate.publish(message) if is_own else gate.reply(address, message)
    stored = encode_send_response(
        state.templates.sent,
        command.opaque,
        0,
        state.templates.message_id(placed.position),
        placed.queue_id,
        placed.queue_offset,
        unique,
    )

    def finish(failure: str) -> None:
        context.peer.hold_until(placed.end)
        context.answer(command, refuse(command, ResponseCode.SYSTEM_ERROR, failure) if failure else stored)

    if is_own:
        _push(state.broker, state.members, state.templates, address, header, message, placed, finish)
    else:
        finish("")
    return None


def take_reply(
    broker: Broker, members: Members, templates: Templates, gate: Gate, client_id: str, reply: Message
) -> Placed:
    """Store *reply*, which a client of another protocol sends, and push it to the producer *client_id*.

    The reply is pushed at once, as is one of a RocketMQ client; the producer's answer is not awaited.
    """
    if members.find_producer(client_id) is None:
        raise Refused(Reason.NOT_FOUND, f"client {client_id[:80]!r} is not connected; it no longer waits for a reply")
    own = {REPLY_TO.encode(): client_id.encode(), b"MSG_TYPE": b"reply"}
    reply.properties, _ = stamp(put_properties(reply.properties, own), templates, broker.ids)
    reply.topic = REPLY_TOPIC.format(broker.config.cluster)
    placed = gate.publish(reply)
    header = SendHeader(
        producer_group=PRODUCER_GROUP,
        topic=reply.topic,
        default_topic=DEFAULT_TOPIC,
        default_queues=1,
        queue_id=placed.queue_id,
        sys_flag=reply.sys_flag,
        born_ms=reply.born_ms,
        flag=reply.flag,
    )

    def finish(failure: str) -> None:
        if failure:
            log.debug("%s", failure)

    _push(broker, members, templates, client_id, header, reply, placed, finish)
    return placed


def _push(
    broker: Broker,
    members: Members,
    templates: Templates,
    client_id: str,
    header: SendHeader,
    message: Message,
    placed: Placed,
    finish: Callable[[str], None],
) -> None:
    member = members.find_producer(client_id) if client_id else None
    if member is None:
        finish(f"push reply message fail, channel of <{client_id}> not found.")
        return

    def answered(answer: Command | None) -> None:
        if answer is None:
            finish(f"push reply message to {client_id} fail; it did not answer in time")
        elif answer.code != ResponseCode.SUCCESS:
            finish(f"push reply message to {client_id} fail; it answered {answer.code}")
        else:
            finish("")

    now_ms = b"%d" % broker.clock.now_ms()
    ext = {
        "producerGroup": header.producer_group,
        "topic": header.topic,
        "defaultTopic": header.default_topic,
        "defaultTopicQueueNums": header.default_queues,
        "queueId": placed.queue_id,
        "sysFlag": header.sys_flag,
        "bornTimestamp": header.born_ms,
        "flag": header.flag,
        "properties": put_property(message.properties, b"PUSH_REPLY_TIME", now_ms).decode("utf-8", "replace"),
        "reconsumeTimes": header.reconsume_times,
        "unitMode": header.unit_mode,
        "bornHost": host_text(message.born_host),
        "storeHost": host_text(templates.store_host),
        "storeTimestamp": placed.store_ms,
    }
    try:
        member.connection.ask(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, ext, message.body, answered)
    except Refused as error:
        finish(f"push reply message to {client_id} fail; {error}")


def host_text(host: bytes) -> str:
    """Return a host from a record as ``ip:port``."""
    address = ip_address(host[:-4])
    shown = f"[{address}]" if address.version == 6 else str(address)
    return f"{shown}:{int.from_bytes(host[-4:], 'big')}"


TABLE: Final[dict[int, Handle]] = {
    RequestCode.SEND_REPLY_MESSAGE: send_reply,
    RequestCode.SEND_REPLY_MESSAGE_V2: send_reply,
}
