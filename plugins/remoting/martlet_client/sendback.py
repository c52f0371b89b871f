"""Gives failed messages back to the broker, or sends them to the retry topic if the broker refuses them."""

import logging
from typing import Final, final

from martlet.records.compression import COMPRESSED, COMPRESSION_BITS
from martlet_client.messages import DELAY, encoded
from martlet_client.network import TEMPLATE_TOPIC, Network
from martlet_client.sending import Sending
from martlet_remoting.wire.answers.errors import ClientError
from martlet_remoting.wire.answers.messages import RETRY_PREFIX, RETRY_TOPIC, DamagedMessage, ReceivedMessage
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.headers import SendHeader
from martlet_remoting.wire.inner_batches import INNER_BATCH, is_inner_batch

__all__ = ["GiveBack"]

log = logging.getLogger(__name__)

SEND_BACK_TIMEOUT_S: Final = 5.0
# Delay level 3 is 10 s; each failure adds one level (RocketMQ DefaultMQPushConsumerImpl).
FIRST_LEVEL: Final = 3


@final
class GiveBack:
    """Gives back messages of a group for later delivery, at most *times_max* times before they become dead letters."""

    def __init__(self, network: Network, group: str, times_max: int, delay_level: int) -> None:
        self.network = network
        self.group = group
        self.times_max = times_max
        self.delay_level = delay_level
        self._sending = Sending(network, group, 2, SEND_BACK_TIMEOUT_S, default_queues=1)

    async def give_back(self, message: ReceivedMessage | DamagedMessage) -> bool:
        """Give *message* back; return whether the broker or the retry topic has it now."""
        if isinstance(message, ReceivedMessage) and is_inner_batch(message.sys_flag):
            return await self.send_to_retry_topic(message)  # the broker would find the whole batch
        try:
            await self._send_back(message)
        except ClientError as error:
            log.warning(
                "message at offset %d of %s could not be given back: %s", message.queue_offset, message.queue, error
            )
            return isinstance(message, ReceivedMessage) and await self.send_to_retry_topic(message)
        return True

    async def _send_back(self, message: ReceivedMessage | DamagedMessage) -> None:
        address = await self.network.broker_address(message.queue.topic, message.queue.broker_name)
        ext = {
            "offset": message.position,
            "group": self.group,
            "delayLevel": self.delay_level,
            "originMsgId": message.message_id if isinstance(message, ReceivedMessage) else "",
            "originTopic": message.queue.topic,
            "unitMode": False,
            "maxReconsumeTimes": self.times_max,
            "bname": message.queue.broker_name,
        }
        await self.network.ask(address, RequestCode.CONSUMER_SEND_MSG_BACK, ext, b"", SEND_BACK_TIMEOUT_S)

    async def send_to_retry_topic(self, message: ReceivedMessage | DamagedMessage) -> bool:
        """Send a copy to the retry topic as an ordinary message; the broker makes it a dead letter in time."""
        if isinstance(message, DamagedMessage):
            return await self.give_back(message)
        try:
            await self._sending.send(self._retry_header(message), message.body, RequestCode.SEND_MESSAGE_V2)
        except ClientError as error:
            log.warning("message %s was not sent to its retry topic: %s", message.message_id, error)
            return False
        return True

    def _retry_header(self, message: ReceivedMessage) -> SendHeader:
        times = message.reconsume_times + 1
        properties = dict(message.properties)
        properties.pop("TRAN_MSG", None)
        properties.setdefault("ORIGIN_MESSAGE_ID", message.message_id)
        properties[RETRY_TOPIC] = message.topic
        properties["RECONSUME_TIME"] = str(times)
        properties["MAX_RECONSUME_TIMES"] = str(self.times_max)
        properties[DELAY] = str(FIRST_LEVEL + message.reconsume_times)
        return SendHeader(
            producer_group=self.group,
            topic=RETRY_PREFIX + self.group,
            default_topic=TEMPLATE_TOPIC,
            default_queues=1,
            queue_id=-1,
            # The body was decompressed on receipt and goes back uncompressed.
            sys_flag=message.sys_flag & ~(COMPRESSED | COMPRESSION_BITS | INNER_BATCH),
            born_ms=self.network.clock.now_ms(),
            flag=message.flag,
            properties=encoded(properties).decode(),
            reconsume_times=times,
            max_reconsume_times=self.times_max,
        )
