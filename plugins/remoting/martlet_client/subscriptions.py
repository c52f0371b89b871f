"""The topics that a push consumer subscribes to: their expressions, their routes, and what brokers say to them."""

import logging
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import final

from martlet_client.arguments import check_type
from martlet_client.messages import check_topic
from martlet_client.network import Network
from martlet_client.pulling import TAG, Expression, TopicSelection, subscription_of
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import BrokerError, ClientError, NameServerUnreachable, RouteNotFound
from martlet_remoting.wire.answers.messages import RETRY_PREFIX
from martlet_remoting.wire.codes import RequestCode

__all__ = ["SubscribedTopics"]

log = logging.getLogger(__name__)


@final
class SubscribedTopics:
    """The subscriptions of *group* by topic, also to its own retry topic if it *retries*.

    *refused* is called when a broker does not evaluate an expression of a topic that is found later.

    Raises:
      TypeError, ValueError, MessageRefused: a topic or an expression is wrong.
    """

    def __init__(
        self,
        network: Network,
        group: str,
        expressions: Mapping[str, Expression],
        retries: bool,
        refused: Callable[[Exception], None],
    ) -> None:
        check_type("subscriptions", expressions, Mapping, "for example {'Greetings': '*'}")
        for topic in expressions:
            check_topic(topic)
        wanted = {**expressions, RETRY_PREFIX + group: "*"} if retries else expressions
        version = network.clock.now_ms()
        self.network = network
        self.group = group
        self.by_topic = {topic: subscription_of(topic, wish, version) for topic, wish in wanted.items()}
        self._refused = refused

    def fields(self) -> list[dict[str, object]]:
        """Return the subscriptions as heartbeats list them."""
        return [found.fields() for found in self.by_topic.values()]

    async def add(self, topic: str, expression: Expression) -> None:
        """Subscribe to *topic*, or change its expression. Raises as `PushConsumer.subscribe`."""
        check_topic(topic)
        subscription = subscription_of(topic, expression, self.network.clock.now_ms())
        with suppress(RouteNotFound):
            await self.network.fetch_route(topic)
        await self._check(subscription)
        self.by_topic[topic] = subscription

    async def introduce(self) -> None:
        """Fetch the routes, send heartbeats, and ask whether brokers evaluate the expressions.

        Raises:
          BrokerError: one does not.
        """
        for topic in self.by_topic:
            try:
                await self.network.fetch_route(topic)
            except RouteNotFound as error:
                # The first heartbeat of a new group creates its retry topic.
                log.log(logging.DEBUG if topic.startswith(RETRY_PREFIX) else logging.INFO, "%s", error)
            except NameServerUnreachable:
                break  # it may start later than this consumer; `fetch_missing_routes` goes on
        await self.network.send_heartbeats()
        for subscription in self.by_topic.values():
            await self._check(subscription)

    async def _check(self, subscription: TopicSelection) -> None:
        """Ask a broker whether it evaluates our SQL92; raises BrokerError instead of consuming nothing for ever."""
        route = self.network.routes.get(subscription.topic)
        if route is None or subscription.expression_type == TAG:
            return
        fields = {"clientId": self.network.client_id, "group": self.group, "subscriptionData": subscription.fields()}
        address = random.choice(route.addresses())
        await self.network.ask(address, RequestCode.CHECK_CLIENT_CONFIG, {}, bodies.dump(fields))

    @property
    def is_route_missing(self) -> bool:
        """Whether some topic has no route yet."""
        return any(topic not in self.network.routes for topic in self.by_topic)

    async def fetch_missing_routes(self) -> bool:
        """Look for topics that had no route; return whether a name server could be reached."""
        is_reached = True
        before = self.network.broker_addresses()
        for topic, subscription in list(self.by_topic.items()):
            if topic not in self.network.routes:
                try:
                    await self.network.fetch_route(topic)
                    await self._check(subscription)
                except BrokerError as error:
                    self._refused(error)  # as when the consumer opens
                except ClientError as error:
                    is_reached = is_reached and not isinstance(error, NameServerUnreachable)
                    log.debug("%s", error)
        if self.network.broker_addresses() != before:
            await self.network.send_heartbeats()
        return is_reached
