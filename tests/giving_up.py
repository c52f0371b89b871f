"""Messages that a group gives up, as its consumer would, so that they become dead letters."""

from martlet_client import Admin, ReceivedMessage
from martlet_remoting.wire.codes import RequestCode


async def give_up(admin: Admin, group: str, topic: str, message: ReceivedMessage) -> None:
    address = await admin.network.broker_address(topic, message.queue.broker_name)
    ext = {
        "offset": message.position,
        "group": group,
        "delayLevel": -1,
        "originMsgId": message.message_id,
        "originTopic": topic,
        "unitMode": False,
        "maxReconsumeTimes": 16,
    }
    await admin.network.ask(address, RequestCode.CONSUMER_SEND_MSG_BACK, ext)
