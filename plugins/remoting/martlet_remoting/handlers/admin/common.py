"""What the administrative requests share: look-ups, and work that takes a while."""

from collections.abc import Callable, Generator
from typing import Final, TypeAlias, final

import trio

from martlet.errors import Reason, Refused, RemoteProtocolError, StoreError
from martlet.store import Queue
from martlet.topics import Topic
from martlet_remoting import fastjson
from martlet_remoting.codes import ResponseCode
from martlet_remoting.context import REASON_CODES, Context, Declined, Handle, Parts, refuse
from martlet_remoting.packets import Command, MessageQueue
from martlet_remoting.routes import Version

__all__ = [
    "Pace",
    "Slow",
    "Steps",
    "end_of",
    "existing_topic",
    "message_queue",
    "saved",
    "slow",
    "stored_ms",
    "version_of",
]

# A step looks at one queue, which may read a piece of the log from the disk.
STEPS_AT_ONCE: Final = 16

# Yields where others may run, and returns the frame of the answer.
Steps: TypeAlias = Generator[None, None, bytes]
Slow: TypeAlias = Callable[[Context, Command], Steps]


def existing_topic(parts: Parts, name: str) -> Topic:
    """Return the topic *name*. Raises `Refused` (NO_TOPIC) when there is none."""
    topic = parts.topics.get(name)
    if topic is None:
        raise Refused(Reason.NO_TOPIC, f"No topic in this broker. topic: {name}; create it with updateTopic")
    return topic


def message_queue(parts: Parts, topic: str, queue_id: int) -> MessageQueue:
    """The queue as clients name it."""
    return MessageQueue(topic, parts.broker.config.name, queue_id)


def end_of(parts: Parts, queue: Queue | None) -> int:
    """The offset behind the newest message that may be read; 0 for a queue that nobody used."""
    return parts.store.end_offset(queue) if queue is not None else 0


def stored_ms(parts: Parts, queue: Queue | None, offset: int) -> int:
    """When the message at *offset* was stored, in ms; 0 when there is none."""
    return max(parts.store.store_ms_at(queue, offset), 0) if queue is not None else 0


@final
class Pace:
    """Counts the steps of some long work, and pauses it now and then."""

    def __init__(self) -> None:
        self._steps = 0

    def step(self) -> Generator[None, None, None]:
        """One more step is done."""
        self._steps += 1
        if self._steps % STEPS_AT_ONCE == 0:
            yield


def version_of(text: str) -> Version:
    """The table version that a header field names; the oldest one when it names none."""
    try:
        return Version.from_json(fastjson.loads(text.encode())) if text else Version()
    except (ValueError, RemoteProtocolError):
        return Version()


def slow(work: Slow) -> Handle:
    """A handler that answers at once what takes one step, and does longer work beside other requests."""

    def handle(context: Context, command: Command) -> bytes | None:
        steps = work(context, command)
        try:
            next(steps)
        except StopIteration as done:
            answer: bytes = done.value
            return answer
        context.peer.start(_go_on, steps, context, command)
        return None

    return handle


def saved(handle: Handle) -> Handle:
    """*handle*, whose answer leaves once what it changed is in its file: what was confirmed outlives a crash."""

    def answer_when_saved(context: Context, command: Command) -> bytes | None:
        frame = handle(context, command)
        if frame is None:
            return None
        done: bytes = frame

        def tell(problem: str) -> None:
            if problem:
                context.parts.count_refusal(ResponseCode.SYSTEM_ERROR)
                text = f"the change is in effect and not yet on the disk; {problem}"
                context.answer(command, refuse(command, ResponseCode.SYSTEM_ERROR, text))
            else:
                context.answer(command, done)

        context.parts.broker.when_saved(tell)
        return None

    return answer_when_saved


async def _go_on(steps: Steps, context: Context, command: Command) -> None:
    try:
        frame = await _last(steps)
    except Refused as error:
        context.parts.count_refusal(REASON_CODES[error.reason])
        frame = refuse(command, REASON_CODES[error.reason], str(error))
    except Declined as error:
        context.parts.count_refusal(error.code)
        frame = refuse(command, error.code, str(error), error.ext)
    except StoreError as error:
        frame = refuse(command, ResponseCode.SYSTEM_ERROR, str(error))
    context.answer(command, frame)


async def _last(steps: Steps) -> bytes:
    """What *steps* return in the end; others run between them."""
    while True:
        await trio.lowlevel.checkpoint()
        try:
            next(steps)
        except StopIteration as done:
            answer: bytes = done.value
            return answer
