"""A pure-Python RocketMQ client over the remoting protocol, for Martlet and for RocketMQ 4.x and 5.x.

These are for trio. `martlet_client.aio` has the same for asyncio, and
`martlet_client.blocking` for plain synchronous code.
"""

from martlet_client.admin import Admin, ClusterInfo, ConnectedMember, QueueLag, QueueStats
from martlet_client.allocation import (
    Allocation,
    Average,
    AverageByCircle,
    ByConfig,
    ByMachineRoom,
    ConsistentHash,
    MachineRoomNearby,
)
from martlet_client.consumer import MessageModel, PushConsumer
from martlet_client.listening import Listener, Outcome
from martlet_client.messages import Message, SendResult, SendStatus
from martlet_client.network import ClientSettings
from martlet_client.offsets import ConsumeFrom
from martlet_client.popping import PopConsumer, PoppedMessage
from martlet_client.producer import Producer, Selector, select_by_hash
from martlet_client.puller import PullConsumer
from martlet_client.pulling import Expression, Pulled, PullStatus, Sql
from martlet_client.request_reply import Reply
from martlet_client.transactions import Check, Execute, TransactionProducer, TransactionResult, TransactionState
from martlet_remoting.wire.answers.errors import (
    Attempt,
    BadAddress,
    BadAnswer,
    BrokerError,
    ClientClosed,
    ClientError,
    ConnectionLost,
    MessageNotFound,
    MessageRefused,
    NameServerUnreachable,
    NoReply,
    RequestTimeout,
    RouteNotFound,
    SendFailed,
)
from martlet_remoting.wire.answers.messages import DamagedMessage, ReceivedMessage
from martlet_remoting.wire.packets import MessageQueue
from martlet_remoting.wire.routes import BrokerGroup, TopicQueues, TopicRoute
from martlet_remoting.wire.signatures import SigningKey

__all__ = [
    "Admin",
    "Allocation",
    "Attempt",
    "Average",
    "AverageByCircle",
    "BadAddress",
    "BadAnswer",
    "BrokerError",
    "BrokerGroup",
    "ByConfig",
    "ByMachineRoom",
    "Check",
    "ClientClosed",
    "ClientError",
    "ClientSettings",
    "ClusterInfo",
    "ConnectedMember",
    "ConnectionLost",
    "ConsistentHash",
    "ConsumeFrom",
    "DamagedMessage",
    "Execute",
    "Expression",
    "Listener",
    "MachineRoomNearby",
    "Message",
    "MessageModel",
    "MessageNotFound",
    "MessageQueue",
    "MessageRefused",
    "NameServerUnreachable",
    "NoReply",
    "Outcome",
    "PopConsumer",
    "PoppedMessage",
    "Producer",
    "PullConsumer",
    "PullStatus",
    "Pulled",
    "PushConsumer",
    "QueueLag",
    "QueueStats",
    "ReceivedMessage",
    "Reply",
    "RequestTimeout",
    "RouteNotFound",
    "Selector",
    "SendFailed",
    "SendResult",
    "SendStatus",
    "SigningKey",
    "Sql",
    "TopicQueues",
    "TopicRoute",
    "TransactionProducer",
    "TransactionResult",
    "TransactionState",
    "select_by_hash",
]
