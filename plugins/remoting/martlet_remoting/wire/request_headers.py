"""The headers of sends, pulls and pops as records; `headers` decodes them."""

from typing import Final, final

from msgspec import Struct

__all__ = [
    "PULL_COMMIT_OFFSET",
    "PULL_LITE",
    "PULL_SUBSCRIPTION",
    "PULL_SUSPEND",
    "PopHeader",
    "PullHeader",
    "SendHeader",
]

# Bits of a pull's sysFlag (RocketMQ PullSysFlag).
PULL_COMMIT_OFFSET: Final = 0x1
PULL_SUSPEND: Final = 0x2
PULL_SUBSCRIPTION: Final = 0x4
PULL_CLASS_FILTER: Final = 0x8
PULL_LITE: Final = 0x10


@final
class SendHeader(Struct):
    """A send's header; ``properties`` is the encoded property string, ``max_reconsume_times`` -1 if not given."""

    producer_group: str
    topic: str
    default_topic: str
    default_queues: int
    queue_id: int
    sys_flag: int
    born_ms: int
    flag: int
    properties: bytes
    reconsume_times: int = 0
    unit_mode: bool = False
    max_reconsume_times: int = -1
    batch: bool = False
    broker_name: str = ""

    def to_ext(self) -> dict[str, object]:
        """Return the header fields under the short names of SEND_MESSAGE_V2."""
        ext: dict[str, object] = {
            "a": self.producer_group,
            "b": self.topic,
            "c": self.default_topic,
            "d": self.default_queues,
            "e": self.queue_id,
            "f": self.sys_flag,
            "g": self.born_ms,
            "h": self.flag,
            "i": self.properties.decode(),
            "j": self.reconsume_times,
            "k": self.unit_mode,
            "m": self.batch,
        }
        if self.max_reconsume_times >= 0:
            ext["l"] = self.max_reconsume_times
        if self.broker_name:
            ext["n"] = self.broker_name
        return ext


@final
class PullHeader(Struct):
    """A pull's header; ``sys_flag`` holds the PULL_ bits."""

    group: str
    topic: str
    queue_id: int
    offset: int
    messages_max: int
    sys_flag: int
    commit_offset: int
    suspend_ms: int
    expression: str = ""
    sub_version: int = 0
    expression_type: str = "TAG"
    bytes_max: int = -1
    broker_name: str = ""

    def to_ext(self) -> dict[str, object]:
        """Return the header fields under their names on the wire."""
        ext: dict[str, object] = {
            "consumerGroup": self.group,
            "topic": self.topic,
            "queueId": self.queue_id,
            "queueOffset": self.offset,
            "maxMsgNums": self.messages_max,
            "sysFlag": self.sys_flag,
            "commitOffset": self.commit_offset,
            "suspendTimeoutMillis": self.suspend_ms,
            "subVersion": self.sub_version,
            "expressionType": self.expression_type,
        }
        if self.sys_flag & PULL_SUBSCRIPTION:
            ext["subscription"] = self.expression
        if self.bytes_max >= 0:
            ext["maxMsgBytes"] = self.bytes_max
        if self.broker_name:
            ext["bname"] = self.broker_name
        return ext


@final
class PopHeader(Struct):
    """The header of a POP_MESSAGE or a NOTIFICATION; ``born_ms`` is 0 if the client did not say when it began."""

    group: str
    topic: str
    queue_id: int
    count_max: int
    invisible_ms: int
    poll_ms: int
    born_ms: int
    init_mode: int
    expression_type: str = "TAG"
    expression: str = ""
    in_order: bool = False
    attempt: str = ""

    def to_ext(self) -> dict[str, object]:
        """Return the header fields under their names on the wire."""
        own = {"attemptId": self.attempt} if self.attempt else {}
        return {
            **own,
            "consumerGroup": self.group,
            "topic": self.topic,
            "queueId": self.queue_id,
            "maxMsgNums": self.count_max,
            "invisibleTime": self.invisible_ms,
            "pollTime": self.poll_ms,
            "bornTime": self.born_ms,
            "initMode": self.init_mode,
            "expType": self.expression_type,
            "exp": self.expression,
            "order": self.in_order,
        }
