"""The queues of a topic on other brokers, according to the name servers.

The name server in this process is read directly. Answers of remote ones are cached for as long as in RocketMQ's
brokers. The members of a group request assignments at the same time; only one query runs at a time, and its answer
serves all of them.
"""

from collections.abc import Sequence
from typing import Final, Protocol, final

import trio

from martlet.errors import MartletError, Reason, Refused
from martlet_remoting.wire.routes import TopicQueues

__all__ = ["OtherBrokers", "Routes"]

FRESH_S: Final = 30.0  # RocketMQ loadBalancePollNameServerInterval
# A client gives up on its own request after 3 s (RebalanceImpl.QUERY_ASSIGNMENT_TIMEOUT).
PATIENCE_S: Final = 2.0
TOPICS_MAX: Final = 10_000


class Routes(Protocol):
    """A source of routes, such as `registrar.Registrar`."""

    @property
    def asks_elsewhere(self) -> bool:
        """Whether remote name servers are configured."""
        ...

    def queues_inside(self, topic: str) -> Sequence[TopicQueues]:
        """Return the queues that the name server in this process knows; empty if there is none."""
        ...

    async def queues_elsewhere(self, topic: str) -> Sequence[TopicQueues]:
        """Return the queues that a remote name server knows.

        Raises: OSError, MartletError, trio.BrokenResourceError: no name server gave a valid answer.
        """
        ...


@final
class OtherBrokers:
    """Cached answers by topic; the oldest are dropped first."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._answers: dict[str, tuple[float, Sequence[TopicQueues]]] = {}
        self._ask_lock = trio.Lock()

    def known(self, topic: str) -> Sequence[TopicQueues] | None:
        """Return the queues of *topic* on all registered brokers; None if a name server must be asked."""
        if not self._routes.asks_elsewhere:
            return self._routes.queues_inside(topic)
        answer = self._answers.get(topic)
        if answer is None or answer[0] < trio.current_time():
            return None
        return [*self._routes.queues_inside(topic), *answer[1]]

    async def ask(self, topic: str) -> Sequence[TopicQueues]:
        """Return the queues of *topic* on all registered brokers; ask a name server if necessary.

        If no name server answers, the last answer is used.

        Raises:
          Refused: no name server answered, and there is no earlier answer (UNAVAILABLE).
        """
        async with self._ask_lock:
            queues = self.known(topic)
            if queues is not None:
                return queues
            try:
                with trio.fail_after(PATIENCE_S):
                    self._keep_answer(topic, await self._routes.queues_elsewhere(topic))
            except (OSError, MartletError, trio.BrokenResourceError, trio.TooSlowError) as error:
                old_answer = self._answers.get(topic)
                if old_answer is None:
                    reason = str(error) or f"none answered within {PATIENCE_S:g} s"
                    text = f"other brokers of topic[{topic}] are unknown, because no name server answered"
                    raise Refused(Reason.UNAVAILABLE, f"{text}; {reason}") from error
                self._keep_answer(topic, old_answer[1])
        return [*self._routes.queues_inside(topic), *self._answers[topic][1]]

    def _keep_answer(self, topic: str, queues: Sequence[TopicQueues]) -> None:
        self._answers.pop(topic, None)
        if len(self._answers) >= TOPICS_MAX:
            del self._answers[next(iter(self._answers))]
        self._answers[topic] = trio.current_time() + FRESH_S, queues
