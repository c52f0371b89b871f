"""Counts what a client missed: messages that retention removed while it was away."""

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
    """Return the topics from which a session with *filters* gets messages that were published while it was away."""
    found: set[str] = set()
    for topic_filter, options in filters.items():
        if grant_of(topic_filter, options).subscription.qos and not is_shared(topic_filter):
            found.update(rules.topics_of(topic_filter))
            if len(found) == len(rules.topics):
                break
    return found


def count_missed(client: "Client") -> Awaitable[None] | None:
    """Count what *client* missed; call this before its cursor moves. Await the result, if there is one, at any time."""
    session, broker = client.session, client.context.broker
    first, steps = broker.store.first_position, broker.sessions.missed.count(PROTOCOL, session.state)
    if session.position >= first:  # only topics with a retention of their own have removed some
        return _count_rest(client, begin(steps))
    count = finish_now(steps)
    _note(client, count)
    if count:
        with suppress(Refused):
            session.move(first)  # so that it is not counted again
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
