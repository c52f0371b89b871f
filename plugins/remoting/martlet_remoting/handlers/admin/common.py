"""Shared code of the administrative requests: look-ups, and answers after a change is saved."""

from collections.abc import Callable
from typing import Final

from martlet.access import TopicOffsets
from martlet.broker import Broker
from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet.runtime.steps import Steps
from martlet.tables.topics import Topic
from martlet_remoting.handlers.context import Handle, RequestContext, refuse
from martlet_remoting.wire import fastjson
from martlet_remoting.wire.codes import ResponseCode
from martlet_remoting.wire.packets import Command, Frame, MessageQueue
from martlet_remoting.wire.routes import Version

__all__ = [
    "QUEUE_US",
    "existing_topic",
    "message_queue",
    "saved",
    "version_of",
]

# A queue may cost two reads of 0.3 ms: a block of entries and a record.
QUEUE_US: Final = 125.0
VERSION_CHARS_MAX: Final = 1024  # of a version's three numbers and their names


def existing_topic(grant: TopicOffsets) -> Topic:
    """Return the topic of *grant*. Raises `Refused` (NO_TOPIC) if it does not exist."""
    topic = grant.get()
    if topic is None:
        raise Refused(Reason.NO_TOPIC, f"No topic in this broker. topic: {grant.name}; create it with updateTopic")
    return topic


def message_queue(broker: Broker, topic: str, queue_id: int) -> MessageQueue:
    """Return a queue in the form of the protocol."""
    return MessageQueue(topic, broker.config.name, queue_id)


def version_of(text: str) -> Version:
    """Return the table version in a header field; the oldest version if the field is empty."""
    try:
        return Version.from_json(fastjson.loads(text.encode())) if 0 < len(text) <= VERSION_CHARS_MAX else Version()
    except (ValueError, RemoteProtocolError):
        return Version()


def saved(handle: Callable[[RequestContext, Command], Frame | Steps[Frame | None] | None]) -> Handle:
    """Return a handler that runs *handle* and answers once the change is on disk and survives a crash."""

    def answer_when_saved(context: RequestContext, command: Command) -> Steps[Frame | None]:
        answer = handle(context, command)
        done = answer if answer is None or isinstance(answer, bytes | list) else (yield from answer)
        if done is None:
            return None
        frame: Frame = done

        def tell(problem: str) -> None:
            if problem:
                context.state.counters.count_refusal(ResponseCode.SYSTEM_ERROR)
                text = f"change is in effect but not yet on disk; {problem}"
                context.answer(command, refuse(command, ResponseCode.SYSTEM_ERROR, text))
            else:
                context.answer(command, frame)

        context.state.broker.call_when_saved(tell)
        return None

    return answer_when_saved
