"""Which queues of a topic other brokers have, as the name servers say.

The name server in this process is read on the spot. Those elsewhere are asked, and what they said is
kept for as long as RocketMQ's brokers keep it. Members of a group ask at the same moment; one
question at a time answers all of them.
"""

from collections.abc import Sequence
from typing import Final, Protocol, final

import trio

from martlet.errors import MartletError, Reason, Refused

from .routes import TopicQueues

__all__ = ["OtherBrokers", "Routes"]

FRESH_S: Final = 30.0  # RocketMQ loadBalancePollNameServerInterval
# A client gives up on its own question after 3 s (RebalanceImpl.QUERY_ASSIGNMENT_TIMEOUT).
PATIENCE_S: Final = 2.0
TOPICS_MAX: Final = 10_000


class Routes(Protocol):
    """Where routes come from; `registration.Registrar` is one."""

    @property
    def asks_elsewhere(self) -> bool:
        """Whether there are name servers in other processes."""
        ...

    def queues_inside(self, topic: str) -> Sequence[TopicQueues]:
        """What the name server in this process says; nothing where there is none."""
        ...

    async def queues_elsewhere(self, topic: str) -> Sequence[TopicQueues]:
        """What a name server elsewhere says.

        Raises:
          OSError, MartletError, trio.BrokenResourceError: none of them answered as it should.
        """
        ...


@final
class OtherBrokers:
    """Answers by topic; bounded, the oldest are forgotten first."""

    __slots__ = ("_asking", "_known", "_routes")

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._known: dict[str, tuple[float, Sequence[TopicQueues]]] = {}
        self._asking = trio.Lock()

    def known(self, topic: str) -> Sequence[TopicQueues] | None:
        """The queues of *topic* on all brokers that are registered; None when a name server has to be asked."""
        if not self._routes.asks_elsewhere:
            return self._routes.queues_inside(topic)
        found = self._known.get(topic)
        if found is None or found[0] < trio.current_time():
            return None
        return [*self._routes.queues_inside(topic), *found[1]]

    async def ask(self, topic: str) -> Sequence[TopicQueues]:
        """As `known`, but ask; where nobody answers, what was said last is still taken for true.

        Raises:
          Refused: nobody answered and nothing is known (UNAVAILABLE).
        """
        async with self._asking:
            fresh = self.known(topic)
            if fresh is not None:
                return fresh
            try:
                with trio.fail_after(PATIENCE_S):
                    self._keep(topic, await self._routes.queues_elsewhere(topic))
            except (OSError, MartletError, trio.BrokenResourceError, trio.TooSlowError) as error:
                held = self._known.get(topic)
                if held is None:
                    reason = str(error) or f"none answered within {PATIENCE_S:g} s"
                    text = f"the other brokers of topic[{topic}] are not known, for no name server can be asked"
                    raise Refused(Reason.UNAVAILABLE, f"{text}; {reason}") from error
                self._keep(topic, held[1])
        return [*self._routes.queues_inside(topic), *self._known[topic][1]]

    def _keep(self, topic: str, queues: Sequence[TopicQueues]) -> None:
        self._known.pop(topic, None)
        if len(self._known) >= TOPICS_MAX:
            del self._known[next(iter(self._known))]
        self._known[topic] = trio.current_time() + FRESH_S, queues
