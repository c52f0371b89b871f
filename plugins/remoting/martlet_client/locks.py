"""Takes, renews and releases the brokers' locks on ordered queues for one member of a group."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

import trio

from martlet_client.consumption import LOCK_LIVE_S, ConsumedQueue
from martlet_client.network import Network
from martlet_client.outages import level_of
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import ClientError
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["Locks"]

log = logging.getLogger(__name__)

LOCK_INTERVAL_S: Final = 20.0


@final
class Locks:
    """Locks of *group* on the queues in *held*, which changes with every rebalance."""

    def __init__(self, network: Network, group: str, held: Mapping[MessageQueue, ConsumedQueue]) -> None:
        self.network = network
        self.group = group
        self._held = held

    async def renew(self) -> None:
        """Renew the locks of all queues for ever; a broker expires a lock 60 s after it was last renewed."""
        while True:
            await trio.sleep(LOCK_INTERVAL_S)
            await self.take(list(self._held))

    async def take(self, queues: Sequence[MessageQueue]) -> None:
        """Lock those of *queues* that are free, and set ``locked_until`` of each."""
        for name, mine in _by_broker(queues).items():
            start = trio.current_time()
            try:
                address = await self.network.broker_address(mine[0].topic, name)
                answer = await self.network.ask(address, RequestCode.LOCK_BATCH_MQ, {}, self._body(mine))
                locked = bodies.queues(bodies.load_object(answer.body), "lockOKMQSet")
            except ClientError as error:
                log.log(level_of(error), "queues of broker %r were not locked: %s", name, error)
                continue
            for queue in mine:
                consumed = self._held.get(queue)
                if consumed is not None:
                    consumed.locked_until = start + LOCK_LIVE_S if queue in locked else -1.0

    async def let_go(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock *queues*; failures are only logged, as locks expire on the broker."""
        for name, mine in _by_broker(queues).items():
            try:
                address = await self.network.broker_address(mine[0].topic, name)
                await self.network.ask(address, RequestCode.UNLOCK_BATCH_MQ, {}, self._body(mine))
            except ClientError as error:
                log.log(level_of(error), "queues of broker %r were not unlocked: %s", name, error)

    def _body(self, queues: Sequence[MessageQueue]) -> bytes:
        return bodies.dump(
            {
                "clientId": self.network.client_id,
                "consumerGroup": self.group,
                "mqSet": [bodies.queue_fields(queue) for queue in queues],
                "onlyThisBroker": False,
            }
        )


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for queue in sorted(queues):
        found.setdefault(queue.broker_name, []).append(queue)
    return found
