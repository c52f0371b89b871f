"""Sends one encoded message to a broker: chooses the queue, retries, and avoids brokers that fail."""

import random
from collections.abc import Sequence
from itertools import count
from typing import Final, final

import trio

from martlet_client.messages import SendResult, SendStatus
from martlet_client.network import TEMPLATE_TOPIC, Network
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import (
    Attempt,
    BrokerError,
    ClientClosed,
    ClientError,
    ConnectionLost,
    NameServerUnreachable,
    RouteNotFound,
    SendFailed,
)
from martlet_remoting.wire.codes import ResponseCode
from martlet_remoting.wire.headers import SendHeader
from martlet_remoting.wire.packets import Command, MessageQueue
from martlet_remoting.wire.routes import TopicRoute

__all__ = ["BrokerFaults", "QueueChoice", "Sending", "Sent", "master_of"]

# Codes that RocketMQ's producer retries (DefaultMQProducer.retryResponseCodes); all others would fail again.
RETRIED_CODES: Final = frozenset(
    (
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    )
)
# Those of them that are permanent for a broker: the same broker would refuse again, another may not.
REFUSALS: Final = frozenset(
    (
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
    )
)
_STORED: Final = {status.value: status for status in SendStatus}
# How long to avoid a broker that failed once, twice, ... in a row, in seconds; one success resets it.
_AVOIDED_S: Final = (0.5, 2.0, 5.0, 10.0, 30.0)
# The pause before the same broker is tried again.
_PAUSE_S: Final = 0.05
_PAUSE_MAX_S: Final = 0.5


@final
class BrokerFaults:
    """Which brokers failed recently, and until when to avoid them."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float]] = {}

    def failed(self, broker_name: str) -> None:
        """Avoid the broker for a while, longer with each failure in a row."""
        times = self._failures.get(broker_name, (0, 0.0))[0]
        pause = _AVOIDED_S[min(times, len(_AVOIDED_S) - 1)]
        self._failures[broker_name] = times + 1, trio.current_time() + pause

    def succeeded(self, broker_name: str) -> None:
        """Forget the broker's failures."""
        self._failures.pop(broker_name, None)

    def avoids(self, broker_name: str) -> bool:
        """Whether the broker should be avoided now."""
        return trio.current_time() < self._failures.get(broker_name, (0, 0.0))[1]


@final
class QueueChoice:
    """Chooses a topic's queues in turn, avoiding brokers that failed while there are others."""

    def __init__(self, faults: BrokerFaults) -> None:
        self._faults = faults
        # So that many producers that start together do not all begin with queue 0.
        self._turns = count(random.randrange(1 << 16))

    def next_queue(self, queues: Sequence[MessageQueue], last_broker: str) -> MessageQueue:
        """Return the next queue, not of *last_broker* if another is left."""
        for wanted in (self._is_healthy, self._is_other):
            for _ in queues:
                queue = queues[next(self._turns) % len(queues)]
                if wanted(queue, last_broker):
                    return queue
        return queues[next(self._turns) % len(queues)]

    def _is_healthy(self, queue: MessageQueue, last_broker: str) -> bool:
        return queue.broker_name != last_broker and not self._faults.avoids(queue.broker_name)

    def _is_other(self, queue: MessageQueue, last_broker: str) -> bool:
        return queue.broker_name != last_broker


@final
class Sending:
    """Sends one encoded request to a broker, with retries; also used by consumers to give messages back."""

    def __init__(self, network: Network, group: str, retries: int, timeout_s: float, default_queues: int = 4) -> None:
        self.network = network
        self.group = group
        self.retries = retries
        self.timeout_s = timeout_s
        self.default_queues = default_queues
        self.faults = BrokerFaults()
        self.choice = QueueChoice(self.faults)

    async def publish_route(self, topic: str) -> tuple[TopicRoute, list[MessageQueue]]:
        """Return where *topic* can be sent to; for an unknown topic, where it may be created.

        Raises:
          RouteNotFound: it does not exist and no broker may create it, or no broker accepts writes.
        """
        route = self.network.routes.get(topic)
        queues = route.write_queues(topic) if route is not None else []
        if route is None or not queues:
            try:
                route = await self.network.fetch_route(topic)
                queues = route.write_queues(topic)
            except RouteNotFound as error:
                route, queues = await self._template_route(topic, error)
        if not queues:
            raise RouteNotFound(topic, "has no writable queue; a broker is down or read-only")
        return route, queues

    async def _template_route(self, topic: str, error: RouteNotFound) -> tuple[TopicRoute, list[MessageQueue]]:
        """Return the route of the template topic: its brokers create *topic* with the first message."""
        try:
            route = await self.network.fetch_route(TEMPLATE_TOPIC)
        except RouteNotFound:
            raise error from None
        return route, route.write_queues(topic, self.default_queues)

    async def send(self, header: SendHeader, body: bytes, code: int, timeout_s: float | None = None) -> "Sent":
        """Return the answer of the first broker that stored it.

        Attempts that reach no broker are repeated until the time is up; of others there are as many as retries allow.

        Raises:
          SendFailed: no broker stored it within the retries and the time limit.
          BrokerError: a broker refused it for a reason that another would share.
          RouteNotFound, NameServerUnreachable: nobody knew where to send it.
        """
        seconds = self.timeout_s if timeout_s is None else timeout_s
        deadline = trio.current_time() + seconds
        attempts: list[Attempt] = []
        retries = self.retries
        while True:
            route_or_error = await self._find_route(header.topic, bool(attempts), deadline)
            if not attempts:
                deadline = trio.current_time() + seconds
            if isinstance(route_or_error, ClientError):
                last_error = route_or_error
                break
            route, queues = route_or_error[0], _not_refused(route_or_error[1], attempts)
            if not queues:
                break
            queue = await self._next_queue(queues, attempts, deadline)
            try:
                return await self.send_to(route, queue, header, body, code, deadline - trio.current_time())
            except ClientError as error:
                if not _is_retried(error):
                    raise
                last_error = error
                attempts.append(Attempt(queue, error))
                self._failed(header.topic, queue, error)
            retries -= not (isinstance(last_error, ConnectionLost) and last_error.was_not_opened)
            if retries < 0 or trio.current_time() >= deadline:
                break
        raise SendFailed(header.topic, tuple(attempts)) from last_error

    async def _find_route(
        self, topic: str, is_again: bool, deadline: float
    ) -> tuple[TopicRoute, list[MessageQueue]] | ClientError:
        """Return where to send to; wait for a name server until *deadline*, and then return why there is none *again*.

        Raises:
          RouteNotFound, NameServerUnreachable: there never was any.
        """
        pause_s = _PAUSE_S
        has_waited = False
        while True:
            try:
                return await self.publish_route(topic)
            except (NameServerUnreachable, RouteNotFound) as error:
                # After an outage a name server knows no brokers until they register again.
                is_known = isinstance(error, RouteNotFound) and not is_again and not has_waited
                if is_known or trio.current_time() + pause_s >= deadline:
                    if not is_again:
                        raise
                    return error
                has_waited = True
            except ClientError as error:
                if not is_again:
                    raise
                return error
            await trio.sleep(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_MAX_S)

    async def _next_queue(
        self, queues: Sequence[MessageQueue], attempts: Sequence[Attempt], deadline: float
    ) -> MessageQueue:
        """Choose the next queue; pause first if only the broker that just failed is left."""
        last_broker = attempts[-1].queue.broker_name if attempts else ""
        queue = self.choice.next_queue(queues, last_broker)
        if queue.broker_name == last_broker:
            pause_s = min(_PAUSE_S * 2 ** min(len(attempts), 10), _PAUSE_MAX_S)
            await trio.sleep(min(pause_s, max(0.0, deadline - trio.current_time())))
        return queue

    def _failed(self, topic: str, queue: MessageQueue, error: ClientError) -> None:
        self.faults.failed(queue.broker_name)
        if isinstance(error, ConnectionLost | RouteNotFound):
            # The broker may have moved: fetch the route again instead of trying the old address.
            self.network.routes.pop(topic, None)

    async def send_to(
        self, route: TopicRoute, queue: MessageQueue, header: SendHeader, body: bytes, code: int, timeout_s: float
    ) -> "Sent":
        """Return the answer of the broker that has *queue*; one attempt."""
        address = master_of(route, queue)
        header.queue_id, header.broker_name = queue.queue_id, queue.broker_name
        answer = await self.network.ask_any(address, code, header.to_ext(), body, timeout_s)
        status = _STORED.get(answer.code)
        if status is None:
            raise BrokerError(answer.code, answer.remark or "", address)
        self.faults.succeeded(queue.broker_name)
        return Sent(answer, status, queue)


def _not_refused(queues: Sequence[MessageQueue], attempts: Sequence[Attempt]) -> list[MessageQueue]:
    """Return *queues* without those of brokers that refused, because they would refuse again."""
    refused = {
        attempt.queue.broker_name
        for attempt in attempts
        if isinstance(attempt.error, BrokerError) and attempt.error.code in REFUSALS
    }
    return [queue for queue in queues if queue.broker_name not in refused]


def _is_retried(error: ClientError) -> bool:
    """Whether another attempt may succeed."""
    if isinstance(error, BrokerError):
        return error.code in RETRIED_CODES
    return not isinstance(error, ClientClosed)


def master_of(route: TopicRoute, queue: MessageQueue) -> str:
    """Return the address of the queue's master; raises RouteNotFound if there is none now."""
    address = route.master(queue.broker_name)
    if address is None:
        raise RouteNotFound(queue.topic, f"has no master at broker {queue.broker_name!r}")
    return address


@final
class Sent:
    """A broker's answer to a send that it stored."""

    __slots__ = ("answer", "queue", "status")

    def __init__(self, answer: Command, status: SendStatus, queue: MessageQueue) -> None:
        self.answer = answer
        self.status = status
        self.queue = queue

    def result(self, message_id: str) -> SendResult:
        """Return the `SendResult` for the producer's caller."""
        answer = self.answer
        queue = MessageQueue(self.queue.topic, self.queue.broker_name, bodies.header_integer(answer, "queueId"))
        return SendResult(
            self.status,
            message_id,
            bodies.header_text(answer, "msgId"),
            queue,
            bodies.header_integer(answer, "queueOffset"),
            bodies.header_text(answer, "transactionId", ""),
            bodies.header_text(answer, "MSG_REGION", "DefaultRegion"),
            bodies.header_text(answer, "recallHandle", ""),
        )
