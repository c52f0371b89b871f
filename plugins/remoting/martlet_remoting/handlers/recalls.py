"""RECALL_MESSAGE: cancels a timed message before it is delivered (RocketMQ RecallMessageProcessor)."""

from typing import Final

from martlet.contracts import Timers
from martlet.errors import Reason, Refused
from martlet.tables.topics import RETRY_PREFIX
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply
from martlet_remoting.wire.codec import encode_response
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.recall_handles import RecallHandle, decode_handle

__all__ = ["TABLE"]


async def recall_message(context: RequestContext, command: Command) -> bytes:
    """Recall the message of a handle; the answer is sent once the recall is durable."""
    topic = command.text("topic")
    if context.gate(command).check_publish(topic).get() is None:
        raise Declined(ResponseCode.TOPIC_NOT_EXIST, f"recall failed, the topic[{topic}] not exist")
    try:
        handle = decode_handle(command.text("recallHandle"))
    except ValueError as error:
        raise Declined(ResponseCode.ILLEGAL_OPERATION, str(error)) from error
    if handle.topic != topic or topic.startswith(RETRY_PREFIX):
        text = f"recall failed, topic not match: the handle is for topic[{handle.topic}], the request for [{topic}]"
        raise Declined(ResponseCode.ILLEGAL_OPERATION, text)
    name = context.state.broker.config.name
    if handle.broker != name:
        text = f"recall failed, broker not match: the handle is for broker {handle.broker!r}, this is {name!r}"
        raise Declined(ResponseCode.ILLEGAL_OPERATION, text)
    return await _recall(context, command, handle)


async def _recall(context: RequestContext, command: Command, handle: RecallHandle) -> bytes:
    timers = context.state.broker.capability(Timers)
    if timers is None or timers.recall is None:
        text = "recall failed, operation is forbidden; add the plugin timer to plugins.enabled"
        raise Refused(Reason.NO_PERMISSION, text)
    try:
        end = await timers.recall(handle.topic, handle.out_ms, handle.unique, command.text("producerGroup", ""))
    except Refused as refused:
        if refused.reason == Reason.NOT_FOUND:
            raise Declined(ResponseCode.ILLEGAL_OPERATION, f"recall failed, {refused}") from refused
        raise
    ext = {"msgId": handle.unique}
    if not end:  # RocketMQ does not check that the message exists
        text = (
            f"nothing was recalled; no message {handle.unique!r} is pending for that time: it was recalled already, or"
        )
        return encode_response(command.opaque, ResponseCode.SUCCESS, ext, remark=f"{text} the handle is wrong")
    context.peer.hold_until(end)
    return reply(command, ext)


TABLE: Final[dict[int, Handle]] = {RequestCode.RECALL_MESSAGE: recall_message}
