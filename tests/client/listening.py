"""What tests of consumers share: a listener that remembers, and waiting for what must come."""

from collections.abc import Awaitable, Callable

import trio

from martlet_client import MessageQueue, Outcome, ReceivedMessage

# Virtual time passes by itself, and a machine on which it does not may be slow.
PATIENCE_S = 200.0


class Listener:
    """Remembers what it was given; `outcome` decides the result."""

    def __init__(self, outcome: Callable[[ReceivedMessage], Outcome | None] = lambda message: None) -> None:
        self.messages: list[ReceivedMessage] = []
        self.outcome = outcome
        self.changed = trio.Event()

    async def __call__(self, message: ReceivedMessage) -> Outcome | None:
        self.messages.append(message)
        self.changed.set()
        self.changed = trio.Event()
        return self.outcome(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    @property
    def places(self) -> set[tuple[MessageQueue, int]]:
        """The offsets of the messages; one that came twice counts once."""
        return {(message.queue, message.queue_offset) for message in self.messages}

    async def wait_count(self, count: int) -> None:
        with trio.fail_after(PATIENCE_S):
            while len(self.messages) < count:
                await self.changed.wait()


async def wait_for(condition: Callable[[], bool]) -> None:
    """Return when *condition* holds."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.1)


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return when *condition*, which has to ask somebody, holds."""
    with trio.fail_after(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110
            await trio.sleep(0.1)
