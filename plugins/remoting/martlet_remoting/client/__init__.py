"""A pure-Python RocketMQ client over the remoting protocol, for Martlet and for RocketMQ 4.x and 5.x.

These are for trio. `martlet_remoting.client.aio` has the same for asyncio, and
`martlet_remoting.client.blocking` for plain synchronous code.
"""

from martlet_remoting.answers.errors import (
    Attempt,
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
from martlet_remoting.answers.messages import DamagedMessage, ReceivedMessage
from martlet_remoting.answers.routes import Route, TopicQueues
from martlet_remoting.packets import MessageQueue
from martlet_remoting.signatures import SigningKey

from .admin import Admin, Cluster, Member, QueueLag, QueueStats
from .allocation import (
    Allocation,
    Average,
    AverageByCircle,
    ByConfig,
    ByMachineRoom,
    ConsistentHash,
    MachineRoomNearby,
)
from .consumer import ConsumeFrom, MessageModel, PushConsumer
from .listening import Listener, Outcome
from .messages import Message, SendResult, SendStatus
from .network import Settings
from .popping import PopConsumer, PoppedMessage
from .producer import Producer, Selector, select_by_hash
from .puller import PullConsumer
from .pulling import Expression, Pulled, PullStatus, Sql
from .request_reply import Reply
from .transactions import Check, Execute, TransactionProducer, TransactionResult, TransactionState

__all__ = [
    "Admin",
    "Allocation",
    "Attempt",
    "Average",
    "AverageByCircle",
    "BadAnswer",
    "BrokerError",
    "ByConfig",
    "ByMachineRoom",
    "Check",
    "ClientClosed",
    "ClientError",
    "Cluster",
    "ConnectionLost",
    "ConsistentHash",
    "ConsumeFrom",
    "DamagedMessage",
    "Execute",
    "Expression",
    "Listener",
    "MachineRoomNearby",
    "Member",
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
    "Route",
    "RouteNotFound",
    "Selector",
    "SendFailed",
    "SendResult",
    "SendStatus",
    "Settings",
    "SigningKey",
    "Sql",
    "TopicQueues",
    "TransactionProducer",
    "TransactionResult",
    "TransactionState",
    "select_by_hash",
]
