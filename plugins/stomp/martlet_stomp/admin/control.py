"""Administrators' requests: SUBSCRIBE to ``/control/connections``, ``/control/subscriptions``, ``/control/queues``.

``/control/delete/queue/NAME`` deletes the state of a queue; the answer is the queue's last row.

The answer is one or more MESSAGE frames, each with a JSON array of objects, and a last MESSAGE with ``browser:end``, as
for a browser. The client need not unsubscribe. A request requires the permission to manage the broker.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.groups.description import GroupOnTopic, describe, describe_all
from martlet.runtime.steps import Budget, Steps
from martlet.state.journal import NEXT_COMMIT
from martlet_stomp.mapping.destinations import Kind, parse_destination
from martlet_stomp.mapping.groups import destination_of_group, queue_group
from martlet_stomp.outbound.browsing import last_frame
from martlet_stomp.shared.context import PROTOCOL, Context
from martlet_stomp.wire.codec import encode_frame
from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.packets import Subscribe, Version

__all__ = ["DELETE", "PREFIX", "answer_request"]

PREFIX: Final = "/control/"
# A request continues with a destination, which begins with a slash.
DELETE: Final = f"{PREFIX}delete"
ROWS_A_MESSAGE: Final = 500

Row = dict[str, Any]


def answer_request(context: Context, gate: Gate, peer: Peer, request: Subscribe, version: Version) -> Steps[None]:
    """Answer *request*, in slices. Raises `StompError` and `Refused`."""
    gate.admin.broker()
    list_rows = _LISTS.get(request.destination)
    if request.destination.startswith(f"{DELETE}/"):
        row = _delete_queue(context, gate, request.destination.removeprefix(DELETE))
        peer.hold_until(NEXT_COMMIT)
        peer.send(_frame(request, [row], version))
        peer.send(last_frame(request.id, 0, request.destination, version))
        return
    if list_rows is None:
        known = ", ".join((*_LISTS, f"{DELETE}/queue/NAME"))
        raise StompError(f"destination {shown(request.destination)} is unknown; there are {known}")
    rows: list[Row] = []
    budget = Budget()
    for row in list_rows(context):
        rows.append(row)
        if len(rows) >= ROWS_A_MESSAGE:
            peer.send(_frame(request, rows, version))
            rows = []
        if budget.is_over():
            yield
    if rows:
        peer.send(_frame(request, rows, version))
    peer.send(last_frame(request.id, 0, request.destination, version))


def _frame(request: Subscribe, rows: list[Row], version: Version) -> bytes:
    body = orjson.dumps(rows)
    headers = [("subscription", request.id)] if request.id is not None else []
    headers += [("message-id", "control"), ("destination", request.destination)]
    headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
    return encode_frame("MESSAGE", headers, body, version)


def _connections(context: Context) -> Iterator[Row]:
    for handler in list(context.clients):
        yield handler.described()


def _subscriptions(context: Context) -> Iterator[Row]:
    for handler in list(context.clients):
        for row in handler.described_subscriptions():
            yield {"session": handler.session, **row}


def _queues(context: Context) -> Iterator[Row]:
    for group in describe_all(context.broker.shared_groups, PROTOCOL):
        yield _row_of(group)


def _row_of(group: GroupOnTopic) -> Row:
    destination = destination_of_group(group.topic, group.group)
    is_queue = destination.startswith(Kind.QUEUE.value)
    return {
        "destination": destination,
        "durable": None if is_queue else group.group,
        "consumers": group.members,
        "held": group.unsettled,
        "waiting": group.waiting,
        "auto_delete": group.auto_delete,
        "owns_topic": group.owns_topic,
        "unused_s": group.unused_s,
    }


def _delete_queue(context: Context, gate: Gate, text: str) -> Row:
    """Delete the state of the queue *text*, and its topic if it was created for the queue; return the last row.

    Raises `StompError` and `Refused`.
    """
    destination = parse_destination(text, context.names)
    if destination.kind is not Kind.QUEUE:
        raise StompError(f"{shown(text)} is no queue; UNSUBSCRIBE ends a durable subscription")
    topic, group, shared_groups = destination.topic, queue_group(destination), context.broker.shared_groups
    found = describe(shared_groups, PROTOCOL, group, topic)
    if found is None:
        raise StompError(f"nobody ever consumed the queue {shown(text)}")
    if found.members:
        raise StompError(f"the queue {shown(text)} has {found.members} consumers; disconnect them first")
    if found.owns_topic:
        gate.admin.topic_deletion(topic).delete()
    else:
        shared_groups.forget(topic, group, context.policy)
    return _row_of(found)


_LISTS: Final[dict[str, Callable[[Context], Iterator[Row]]]] = {
    f"{PREFIX}connections": _connections,
    f"{PREFIX}subscriptions": _subscriptions,
    f"{PREFIX}queues": _queues,
}
