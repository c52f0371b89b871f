"""What the administrative requests share: look-ups, and work that takes a while."""

from collections.abc import Callable
from typing import Final

from martlet.access import TopicFigures
from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet.tables.topics import Topic
from martlet.turns import Steps
from martlet_remoting import fastjson
from martlet_remoting.codes import ResponseCode
from martlet_remoting.context import Beside, Context, Handle, Later, Parts, refuse
from martlet_remoting.packets import Command, Frame, MessageQueue
from martlet_remoting.routes import Version

__all__ = [
    "QUEUES_AT_ONCE",
    "existing_topic",
    "message_queue",
    "saved",
    "slow",
    "version_of",
]

# A step looks at one queue, which may read a piece of the log from the disk.
QUEUES_AT_ONCE: Final = 16
VERSION_CHARS_MAX: Final = 1024  # of three numbers and their names


def existing_topic(grant: TopicFigures) -> Topic:
    """Return the topic of *grant*. Raises `Refused` (NO_TOPIC) when there is none."""
    topic = grant.get()
    if topic is None:
        raise Refused(Reason.NO_TOPIC, f"No topic in this broker. topic: {grant.name}; create it with updateTopic")
    return topic


def message_queue(parts: Parts, topic: str, queue_id: int) -> MessageQueue:
    """The queue as clients name it."""
    return MessageQueue(topic, parts.broker.config.name, queue_id)


def version_of(text: str) -> Version:
    """The table version that a header field names; the oldest one when it names none."""
    try:
        return Version.from_json(fastjson.loads(text.encode())) if 0 < len(text) <= VERSION_CHARS_MAX else Version()
    except (ValueError, RemoteProtocolError):
        return Version()


def slow(work: Callable[[Context, Command], Steps[Frame | None]]) -> Handle:
    """A handler that answers at once what takes one slice, and does longer work beside other requests."""
    return lambda context, command: Beside(work(context, command))


def saved(handle: Handle) -> Handle:
    """*handle*, whose answer leaves once what it changed is in its file: what was confirmed outlives a crash."""

    def answer_when_saved(context: Context, command: Command) -> Steps[Frame | None]:
        answer = handle(context, command)
        assert not isinstance(answer, Beside | Later)
        done = answer if answer is None or isinstance(answer, bytes | list) else (yield from answer)
        if done is None:
            return None
        frame: Frame = done

        def tell(problem: str) -> None:
            if problem:
                context.parts.count_refusal(ResponseCode.SYSTEM_ERROR)
                text = f"the change is in effect and not yet on the disk; {problem}"
                context.answer(command, refuse(command, ResponseCode.SYSTEM_ERROR, text))
            else:
                context.answer(command, frame)

        context.parts.broker.when_saved(tell)
        return None

    return answer_when_saved
