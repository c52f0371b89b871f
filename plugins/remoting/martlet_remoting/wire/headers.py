"""The header fields of the most frequent requests, sends and pulls, as records.

Other requests have few fields, which their handlers read from the `Command`.
"""

from typing import Final, TypeAlias, final

from martlet.errors import Reason, Refused
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.fields import AckHead, EndHead, SendHead, pop_fields, pull_fields
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.request_headers import PopHeader, PullHeader, SendHeader

__all__ = [
    "Ack",
    "AckRun",
    "End",
    "Send",
    "SendRun",
    "decode_pop_header",
    "decode_pull_header",
    "decode_send_header",
]


_LONG_NAMES: Final = frozenset((RequestCode.SEND_MESSAGE, RequestCode.SEND_REPLY_MESSAGE))
# The values with which Java, Go and C++ clients write true.
_TRUE: Final = (True, "true", "True")

# A send of a run: its header, its body, and the end of its frame in the receive buffer. An end of a transaction, an
# acknowledgement.
Send: TypeAlias = tuple[SendHead, bytes, int]
End: TypeAlias = tuple[EndHead, int]
Ack: TypeAlias = tuple[AckHead, int]


@final
class SendRun:
    """Consecutive requests of one read that store messages: SEND_MESSAGE_V2 and END_TRANSACTION.

    The handler sets `taken` to the number of sends that it has handled, from the first one on, and handles all
    `taken_ends`. The next send then follows as a `Command`. ``count`` is the number of sends, ``end`` the end of the
    last frame.
    """

    __slots__ = ("count", "end", "ends", "sends", "taken")

    def __init__(self, sends: list[Send], ends: list[End], end: int) -> None:
        self.sends = sends
        self.count = len(sends)
        self.ends = ends
        self.end = end
        self.taken = 0

    def __len__(self) -> int:
        return len(self.sends) + len(self.ends)

    def taken_ends(self) -> list[End]:
        """Return the ends of transactions before the first send that was not taken."""
        if self.taken == len(self.sends):
            return self.ends
        limit = self.sends[self.taken][2]
        return [end for end in self.ends if end[1] < limit]

    def taken_to(self) -> int:
        """Return where the last frame ends that was taken; 0 if none was."""
        if self.taken == len(self.sends):
            return self.end
        ends = self.taken_ends()
        last = self.sends[self.taken - 1][2] if self.taken else 0
        return max(last, ends[-1][1]) if ends else last

    def rest(self) -> "SendRun":
        """Return the requests after the first send that was not taken."""
        return SendRun(self.sends[self.taken + 1 :], self.ends[len(self.taken_ends()) :], self.end)


@final
class AckRun:
    """Consecutive ACK_MESSAGE requests of one read.

    The handler sets `taken` to the number that it has handled, from the first one on. The next one then follows as a
    `Command`. ``end`` is the end of the last frame.
    """

    __slots__ = ("acks", "count", "end", "taken")

    def __init__(self, acks: list[Ack]) -> None:
        self.acks = acks
        self.count = len(acks)
        self.end = acks[-1][1] if acks else 0
        self.taken = 0

    def __len__(self) -> int:
        return len(self.acks)

    def taken_to(self) -> int:
        """Return where the last frame ends that was taken; 0 if none was."""
        return self.acks[self.taken - 1][1] if self.taken else 0

    def rest(self) -> "AckRun":
        """Return the requests after the first one that was not taken."""
        return AckRun(self.acks[self.taken + 1 :])


def decode_send_header(command: Command) -> SendHeader:
    """Return the header of any send, with long or short field names.

    A batch has the field ``batch`` or code 320; C++ clients send batches with code 310.

    Raises:
      Refused: a mandatory field is missing or is not a number.
    """
    if command.code in _LONG_NAMES:
        return _long_send_header(command)
    get = command.ext.get
    integer = command.integer
    group, topic, default_topic, properties, broker_name = get("a"), get("b"), get("c"), get("i"), get("n")
    if type(topic) is not str or not topic or type(group) is not str:
        raise Refused(Reason.MALFORMED, "send request lacks the header field a (producerGroup) or b (topic)")
    return SendHeader(
        group,
        topic,
        default_topic if type(default_topic) is str else "",
        integer("d", 4),
        integer("e"),
        integer("f", 0),
        integer("g", 0),
        integer("h", 0),
        properties.encode() if type(properties) is str else b"",
        integer("j", 0),
        get("k") in _TRUE,
        -1 if get("l") is None else integer("l", -1),
        get("m") in _TRUE or command.code == RequestCode.SEND_BATCH_MESSAGE,
        broker_name if type(broker_name) is str else "",
    )


def _long_send_header(command: Command) -> SendHeader:
    return SendHeader(
        command.text("producerGroup"),
        command.text("topic"),
        command.text("defaultTopic", ""),
        command.integer("defaultTopicQueueNums", 4),
        command.integer("queueId"),
        command.integer("sysFlag", 0),
        command.integer("bornTimestamp", 0),
        command.integer("flag", 0),
        command.text("properties", "").encode(),
        command.integer("reconsumeTimes", 0),
        command.boolean("unitMode"),
        command.integer("maxReconsumeTimes", -1),
        command.boolean("batch"),
        command.text("bname", ""),
    )


def decode_pull_header(command: Command) -> PullHeader:
    """Return the header of a PULL_MESSAGE or LITE_PULL_MESSAGE.

    Raises:
      Refused: a mandatory field is missing or is not a number.
    """
    fields = pull_fields(command)
    if fields is None:
        return _odd_pull_header(command)
    return PullHeader(
        fields.consumerGroup,
        fields.topic,
        fields.queueId,
        fields.queueOffset,
        fields.maxMsgNums,
        fields.sysFlag,
        fields.commitOffset,
        fields.suspendTimeoutMillis,
        fields.subscription,
        fields.subVersion,
        fields.expressionType or "TAG",
        fields.maxMsgBytes,
        fields.bname,
    )


def _odd_pull_header(command: Command) -> PullHeader:
    return PullHeader(
        command.text("consumerGroup"),
        command.text("topic"),
        command.integer("queueId"),
        command.integer("queueOffset"),
        command.integer("maxMsgNums"),
        command.integer("sysFlag", 0),
        command.integer("commitOffset", 0),
        command.integer("suspendTimeoutMillis", 0),
        command.text("subscription", ""),
        command.integer("subVersion", 0),
        command.text("expressionType", "TAG") or "TAG",
        command.integer("maxMsgBytes", -1),
        command.text("bname", ""),
    )


def decode_pop_header(command: Command) -> PopHeader:
    """Return the header of a POP_MESSAGE or a NOTIFICATION.

    Raises:
      Refused: a mandatory field is missing or is not a number.
    """
    fields = pop_fields(command)
    if fields is None:
        return _odd_pop_header(command)
    return PopHeader(
        fields.consumerGroup,
        fields.topic,
        fields.queueId,
        fields.maxMsgNums,
        fields.invisibleTime,
        fields.pollTime,
        fields.bornTime,
        fields.initMode,
        fields.expType,
        fields.exp,
        fields.order,
        fields.attemptId,
    )


def _odd_pop_header(command: Command) -> PopHeader:
    takes = command.code != RequestCode.NOTIFICATION
    return PopHeader(
        command.text("consumerGroup"),
        command.text("topic"),
        command.integer("queueId"),
        command.integer("maxMsgNums", None if takes else 1),
        command.integer("invisibleTime", None if takes else 0),
        command.integer("pollTime"),
        command.integer("bornTime", 0),
        command.integer("initMode", 0),
        command.text("expType", "TAG"),
        command.text("exp", ""),
        command.boolean("order"),
        command.text("attemptId", ""),
    )
