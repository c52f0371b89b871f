"""Asks live producers about transactions, for the plugin that holds half messages (`martlet.contracts.Producers`)."""

from collections.abc import Callable
from typing import final

from martlet.message import Message, Record, find_property
from martlet.records.codec import encode_record
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.wire.codes import RequestCode

__all__ = ["RemotingProducers"]


@final
class RemotingProducers:
    """The producers of all remoting connections; *state* returns None before the plugin has a broker."""

    def __init__(self, state: Callable[[], RemotingState | None]) -> None:
        self._state = state

    def check_transaction(self, group: str, half: Record, topic: str, queue_id: int) -> bool:
        """Send CHECK_TRANSACTION_STATE to the next producer of *group* (RocketMQ Broker2Client)."""
        state = self._state()
        member = state.members.next_producer(group) if state is not None else None
        if state is None or member is None:
            return False
        unique = find_property(half.properties, b"UNIQ_KEY").decode("utf-8", "replace")
        ext = {
            "topic": topic,
            "commitLogOffset": half.position,
            "tranStateTableOffset": half.queue_offset,
            "msgId": unique,
            "transactionId": unique,
            "offsetMsgId": state.templates.message_id(half.position),
            "bname": state.broker.config.name,
        }
        member.connection.tell(RequestCode.CHECK_TRANSACTION_STATE, ext, _as_sent(half, topic, queue_id))
        return True


def _as_sent(half: Record, topic: str, queue_id: int) -> bytes:
    """Return the record of *half* with its original topic and queue."""
    message = Message(
        topic,
        half.body,
        half.properties,
        queue_id,
        half.flag,
        half.sys_flag,
        half.born_ms,
        half.born_host,
        half.reconsume_times,
    )
    return encode_record(message, queue_id, half.queue_offset, half.position, half.store_ms, half.store_host)
