"""Counting the messages that a client missed, because retention removed them while it was away."""

from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from martlet.errors import Refused
from martlet.runtime.steps import Steps, begin, finish_now
from martlet_mqtt.mapping.rules import TopicRules
from martlet_mqtt.outbound.stored_subscriptions import grant_of
from martlet_mqtt.shared.context import PROTOCOL
from martlet_mqtt.wire.names import is_shared

if TYPE_CHECKING:
    from martlet_mqtt.session.client import Client

__all__ = ["count_missed", "topics_of_durable"]


def topics_of_durable(rules: TopicRules, filters: Mapping[str, bytes]) -> set[str]:
    """Return the topics whose messages a session with *filters* gets even if published while its client was away."""
    topics: set[str] = set()
    for topic_filter, options in filters.items():
        if grant_of(topic_filter, options).subscription.qos and not is_shared(topic_filter):
            topics.update(rules.topics_of(topic_filter))
            if len(topics) == len(rules.topics):
                break
    return topics


def count_missed(client: "Client") -> Awaitable[None] | None:
    """Count the messages that *client* missed, before its cursor moves; await the result, if not None, at any time."""
    session, broker = client.session, client.context.broker
    first, steps = broker.store.oldest_position, broker.sessions.missed.count(PROTOCOL, session.state)
    if session.position >= first:  # nothing is lost; only topics with their own retention removed messages
        return _count_rest(client, begin(steps))
    count = finish_now(steps)
    _note(client, count)
    if count:
        with suppress(Refused):
            session.move(first)  # so that these messages are not counted again
    return None


async def _count_rest(client: "Client", steps: Steps[int]) -> None:
    _note(client, await client.context.broker.turns.finish(steps))


def _note(client: "Client", count: int) -> None:
    """Count and log that *client* missed *count* messages; -1 if the number is unknown."""
    client.missed = count if count >= 0 else None
    if not count:
        return
    counters = client.context.counters
    counters.missed += max(count, 0)
    counters.missed_sessions += 1
    removed = f"{count} messages" if count > 0 else "an unknown number of messages"
    text = f"retention removed {removed} of its topics, and those that match its filters are lost to it; "
    text += "keep messages longer (store.file_reserved_hours, or the retention of the topic)"
    client.complain("messages were removed before the return of", text)
