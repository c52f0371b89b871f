"""Asks live producers about transactions, for the plugin that holds half messages (`martlet.contracts.Producers`)."""

from collections.abc import Callable
from typing import final

from martlet.contracts import Producers
from martlet.message import Message, Record, find_property
from martlet.store.codec import encode_record

from .codes import RequestCode
from .context import Parts

__all__ = ["RemotingProducers"]


@final
class RemotingProducers(Producers):
    """The producers of all remoting connections; *parts* are there once the plugin serves."""

    def __init__(self, parts: Callable[[], Parts | None]) -> None:
        self._parts = parts

    def check_transaction(self, group: str, half: Record, topic: str, queue_id: int) -> bool:
        """Send CHECK_TRANSACTION_STATE to the next producer of *group* (RocketMQ Broker2Client)."""
        parts = self._parts()
        channel = parts.members.next_producer(group) if parts is not None else None
        if parts is None or channel is None:
            return False
        unique = find_property(half.properties, b"UNIQ_KEY").decode("utf-8", "replace")
        ext = {
            "topic": topic,
            "commitLogOffset": half.position,
            "tranStateTableOffset": half.queue_offset,
            "msgId": unique,
            "transactionId": unique,
            "offsetMsgId": parts.message_id(half.position),
            "bname": parts.broker.config.name,
        }
        channel.line.tell(RequestCode.CHECK_TRANSACTION_STATE, ext, _as_sent(half, topic, queue_id))
        return True


def _as_sent(half: Record, topic: str, queue_id: int) -> bytes:
    """The record of *half* with the topic and the queue that its producer sent it to."""
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
