"""Queries for messages by key, by unique key, and by the log position in an offset message id."""

from typing import Final

from martlet.runtime.steps import Steps
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply, reply_in_pieces
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command, Frame

__all__ = ["TABLE"]

FOUND_MAX: Final = 64  # RocketMQ messageStoreConfig.maxMsgsNumBatch
FOUND_UNIQUE_MAX: Final = 32  # defaultQueryMaxNum
ANSWER_BYTES_MAX: Final = 12 * 1024 * 1024  # clients accept frames of up to 16 MiB


def query_message(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the records whose index entries match a key; hashes may collide, so the client compares the keys."""
    topic, key = command.text("topic"), command.text("key")
    count_max = command.integer("maxNum")
    if command.boolean("_UNIQUE_KEY_QUERY"):
        count_max = FOUND_UNIQUE_MAX
    gate = context.gate(command)
    count_max = min(max(count_max, 1), FOUND_MAX)
    begin_ms, end_ms = command.integer("beginTimestamp"), command.integer("endTimestamp")
    found = yield from gate.queries.keys(topic, key.encode(), count_max, begin_ms, end_ms, ANSWER_BYTES_MAX)
    records = found.records
    if not records:
        text = f"can not find message, maybe time range not correct; no key {key!r:.80} in topic[{topic}]"
        raise Declined(ResponseCode.QUERY_NOT_FOUND, text, {"indexLastUpdateTimestamp": found.index_ms})
    ext = {"indexLastUpdateTimestamp": found.index_ms, "indexLastUpdatePhyoffset": found.index_position}
    return reply_in_pieces(command, records, ext)


async def view_message(context: RequestContext, command: Command) -> bytes:
    """Answer the record at a position of the log."""
    position = command.integer("offset")
    data = await context.gate(command).queries.record_at(position)
    if data is None:
        raise Declined(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {position}")
    return reply(command, body=data)


TABLE: Final[dict[int, Handle]] = {
    RequestCode.QUERY_MESSAGE: query_message,
    RequestCode.VIEW_MESSAGE_BY_ID: view_message,
}
