"""Administrators' requests: PUBLISH to ``$CONTROL/martlet/v1/COMMAND``, in the style of Mosquitto's plugins.

The payload is a JSON object, or empty. The answer is one or more messages to ``$CONTROL/martlet/v1/response``, sent to
the same client without a subscription: JSON objects with ``command``, and ``rows`` and ``done`` or ``error``.
A request requires the permission to manage the broker.

| command | fields of the request | each row of the answer |
|---|---|---|
| clients | | a session, connected or not |
| subscriptions | client (optional) | a filter of a session |
| shared | | a shared subscription of a topic, with members or without |
| forget | filter, such as $share/workers/jobs/# | the forgotten subscription on a topic, as in shared |
| retained | filter (optional) | the name and log position of a retained message |
| kick | client | whether the client was connected |
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.errors import Reason, Refused
from martlet.groups.description import GroupOnTopic, describe, describe_all
from martlet.runtime.steps import Budget, Steps
from martlet.sessions.journal_codec import NEVER_MS, SessionState
from martlet.state.journal import NEXT_COMMIT
from martlet_mqtt.mapping.frames import publish_frame
from martlet_mqtt.outbound.shares import POLICY, group_of
from martlet_mqtt.outbound.stored_subscriptions import grant_of
from martlet_mqtt.shared.context import PROTOCOL, Context
from martlet_mqtt.wire.codes import V5
from martlet_mqtt.wire.connection import MqttConnection, State
from martlet_mqtt.wire.errors import MqttError
from martlet_mqtt.wire.names import SHARE, split_shared
from martlet_mqtt.wire.packets import Publish

__all__ = ["PREFIX", "RESPONSE", "answer_request"]

PREFIX: Final = "$CONTROL/martlet/v1/"
RESPONSE: Final = b"$CONTROL/martlet/v1/response"
ROWS_A_MESSAGE: Final = 500
# Parsing larger JSON in one piece would delay other clients.
REQUEST_BYTES_MAX: Final = 16_384

Row = dict[str, Any]


def answer_request(
    context: Context, gate: Gate, peer: Peer, packet: Publish, connection: MqttConnection
) -> Steps[None]:
    """Answer the request in *packet*, in slices."""
    command = packet.topic.removeprefix(PREFIX)
    properties, limit = b"" if connection.version == V5 else None, connection.accepted_bytes_max

    def send(content: Row) -> None:
        if connection.state is State.ENDED:
            return  # the client was disconnected meanwhile, perhaps by this request [MQTT-3.14.4-1]
        data = orjson.dumps({"command": command, **content}, default=str)
        frame = publish_frame(RESPONSE, data, 0, properties)
        rows: list[Row] = content.get("rows", [])
        if len(frame) <= limit:
            peer.send(frame)
        elif len(rows) > 1:
            half = len(rows) // 2
            send({**content, "rows": rows[:half], "done": False})
            send({**content, "rows": rows[half:]})
        elif "error" not in content:
            send({"error": f"a row is larger than the {limit} bytes that the client accepts"})

    try:
        gate.admin.broker()
        if len(packet.payload) > REQUEST_BYTES_MAX:
            send({"error": f"the request has {len(packet.payload)} bytes; at most {REQUEST_BYTES_MAX} are accepted"})
            return
        request = orjson.loads(packet.payload) if packet.payload else {}
        work = _COMMANDS.get(command)
        if work is None or not isinstance(request, dict):
            send({"error": f"request {command!r} is unknown; send one of {', '.join(_COMMANDS)} with a JSON object"})
            return
        rows: list[Row] = []
        budget = Budget()
        for row in work(context, request):
            if row:
                rows.append(row)
            if len(rows) >= ROWS_A_MESSAGE:
                send({"rows": rows, "done": False})
                rows = []
            if budget.is_over():
                yield
        if command == "forget":
            peer.hold_until(NEXT_COMMIT)
        send({"rows": rows, "done": True})
    except orjson.JSONDecodeError as error:
        send({"error": f"the payload is no JSON; {error}"})
    except (Refused, MqttError) as refused:
        send({"error": str(refused)})


def _sessions(context: Context) -> Iterator[tuple[str, SessionState | None]]:
    """Yield the client identifier and stored state of each session; None for the state of an unstored session."""
    table, prefix = context.broker.sessions.table, f"{PROTOCOL} "
    stored = set[str]()
    for key in table:
        if key.startswith(prefix):
            client_id = key.removeprefix(prefix)
            stored.add(client_id)
            yield client_id, table.get(key)
    for client_id in list(context.clients):
        if client_id not in stored:
            yield client_id, None


def _clients(context: Context, request: Row) -> Iterator[Row]:
    for client_id, state in _sessions(context):
        client = context.clients.get(client_id)
        row: Row = {"client": client_id, "connected": client is not None}
        if client is not None:
            row |= client.described()
        elif state is not None:
            ends_ms = state.ends_ms
            row |= {
                "user": state.owner,
                "subscriptions": len(state.filters),
                "in_flight": len(state.flight),
                "ends_ms": None if ends_ms in (0, NEVER_MS) else ends_ms,
            }
        yield row


def _subscriptions(context: Context, request: Row) -> Iterator[Row]:
    wanted = request.get("client")
    for client_id, state in _sessions(context):
        if wanted is not None and client_id != wanted:
            yield {}
            continue
        client = context.clients.get(client_id)
        filters = client.filters if client is not None else state.filters if state is not None else {}
        for topic_filter, options in list(filters.items()):
            grant = grant_of(topic_filter, options)
            each = grant.subscription
            yield {
                "client": client_id,
                "filter": topic_filter,
                "qos": each.qos,
                "no_local": each.no_local,
                "retain_as_published": each.retain_as_published,
                "retain_handling": each.retain_handling,
                "identifier": grant.identifier or None,
                "selector": grant.selector or None,
            }


def _shared(context: Context, request: Row) -> Iterator[Row]:
    for found in describe_all(context.broker.shared_groups, PROTOCOL):
        yield _row_of(found)


def _row_of(group: GroupOnTopic) -> Row:
    return {
        "filter": f"{SHARE}{group.group}",
        "topic": group.topic,
        "members": group.members,
        "held": group.unsettled,
    }


def _forget(context: Context, request: Row) -> Iterator[Row]:
    """Forget a shared subscription that no connected client has. Raises `MqttError` and `Refused`."""
    topic_filter = str(request.get("filter", ""))
    shared = split_shared(topic_filter)
    if shared is None:
        raise Refused(Reason.ILLEGAL, f"{topic_filter!r} is no shared subscription; write $share/GROUP/FILTER")
    shared_groups, group = context.broker.shared_groups, group_of(shared)
    topics = shared_groups.state.known.topics_of(PROTOCOL, group)
    rows = [found for topic in topics if (found := describe(shared_groups, PROTOCOL, group, topic)) is not None]
    members = max((found.members for found in rows), default=0)
    if members:
        raise Refused(Reason.BUSY, f"{topic_filter} has {members} members; disconnect them first")
    for found in rows:
        shared_groups.forget(found.topic, group, POLICY)
        yield _row_of(found)


def _retained(context: Context, request: Row) -> Iterator[Row]:
    for name in context.retained.matches(str(request.get("filter", "#"))):
        position = context.retained.position(name)
        yield {"name": name, "position": position} if position >= 0 else {}


def _kick(context: Context, request: Row) -> Iterator[Row]:
    client = context.clients.get(str(request.get("client", "")))
    if client is not None:
        client.kick()
    yield {"client": request.get("client"), "kicked": client is not None}


_COMMANDS: Final[dict[str, Callable[[Context, Row], Iterator[Row]]]] = {
    "clients": _clients,
    "subscriptions": _subscriptions,
    "shared": _shared,
    "forget": _forget,
    "retained": _retained,
    "kick": _kick,
}
