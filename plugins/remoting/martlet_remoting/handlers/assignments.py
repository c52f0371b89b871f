"""QUERY_ASSIGNMENT: the broker allocates a topic's queues to the members of a group.

Java consumers with ``setClientRebalance(false)`` send one per topic after each change of their group, and consume the
queues in the answer (RocketMQ QueryAssignmentProcessor), by pulls or pops depending on the group's mode.
"""

from collections.abc import Mapping, Sequence
from typing import Final, final

import orjson
from msgspec import Struct

from martlet.access import ConsumeGrant
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet.tables.topics import QUEUES_MAX, READ, RETRY_PREFIX
from martlet_remoting.consumers.members import BROADCASTING, CLUSTERING, Members
from martlet_remoting.consumers.pops import ANY_QUEUE
from martlet_remoting.consumers.request_modes import MODES, POP, PULL, RequestMode
from martlet_remoting.handlers.admin.common import saved
from martlet_remoting.handlers.bodies import enum_name, integer, read_body, text
from martlet_remoting.handlers.context import Handle, RequestContext, refuse, reply, reply_in_pieces
from martlet_remoting.wire.averages import Average, AverageByCircle
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command, Frame
from martlet_remoting.wire.routes import TopicQueues

__all__ = ["TABLE"]

# The share of a client that pops the queues of all brokers.
EVERY_BROKER: Final = (ANY_QUEUE,)
ID_US: Final = 0.01
SHARED_MAX: Final = 1_000_000
MODELS: Final = (BROADCASTING, CLUSTERING)
STRATEGIES: Final[Mapping[str, Average | AverageByCircle]] = {s.name: s for s in (Average(), AverageByCircle())}


@final
class AssignmentQuery(Struct, frozen=True):
    """The fields of a QUERY_ASSIGNMENT request."""

    group: str
    topic: str
    client_id: str
    model: str
    strategy: str


def query_assignment(context: RequestContext, command: Command) -> Steps[Frame | None]:
    """Answer the queues of a topic that the client gets; an answer without a list means that it keeps its queues."""
    query = yield from _read_query(command)
    grant = context.gate(command).consume(query.group, query.topic)
    others = context.state.others
    queues_elsewhere = others.known(query.topic) if others is not None else ()
    if queues_elsewhere is not None:
        state = context.state
        mode = state.request_modes.get(query.topic, query.group)
        return (
            yield from _answer(state.broker.config.name, state.members, mode, grant, command, query, queues_elsewhere)
        )
    context.peer.start(_ask_and_answer, context, grant, command, query)
    return None


def _read_query(command: Command) -> Steps[AssignmentQuery]:
    body = yield from read_body(command)
    group, topic = text(body, "consumerGroup"), text(body, "topic")
    if not group or not topic:
        raise Refused(Reason.MALFORMED, "assignment query lacks consumerGroup or topic; send both")
    model = enum_name(body, "messageModel", MODELS, "")
    if model not in MODELS:
        raise Refused(Reason.MALFORMED, f"messageModel {model!r} is unknown; it must be one of {', '.join(MODELS)}")
    return AssignmentQuery(group, topic, text(body, "clientId"), model, text(body, "strategyName"))


async def _ask_and_answer(
    context: RequestContext, grant: ConsumeGrant, command: Command, query: AssignmentQuery
) -> None:
    state = context.state
    assert state.others is not None
    try:
        known = await state.others.ask(query.topic)
        mode = state.request_modes.get(query.topic, query.group)
        answer = await state.broker.turns.finish(
            _answer(state.broker.config.name, state.members, mode, grant, command, query, known)
        )
    except Refused as error:
        code = state.templates.reason_codes[error.reason]
        state.counters.count_refusal(code)
        answer = refuse(command, code, str(error))
    context.answer(command, answer)


def _answer(
    own_name: str,
    members: Members,
    mode: RequestMode,
    grant: ConsumeGrant,
    command: Command,
    query: AssignmentQuery,
    elsewhere: Sequence[TopicQueues],
) -> Steps[bytes]:
    counts = _read_queues(own_name, grant, elsewhere)
    total = sum(counts.values())
    if total > QUEUES_MAX:
        text_ = f"topic[{query.topic}] has {total} queues on {len(counts)} brokers"
        raise Refused(Reason.BUSY, f"{text_}; at most {QUEUES_MAX} can be allocated")
    places = [(broker, number) for broker in sorted(counts) for number in range(counts[broker])]
    share = (yield from _share(members, mode, query, total)) if total else None
    if share is None:
        return reply(command, body=b"{}")
    if share is EVERY_BROKER:
        queues = [(broker, ANY_QUEUE) for broker in sorted(counts)]
    else:
        queues = list(map(places.__getitem__, share))
    assignments: list[dict[str, object]] = []
    budget = Budget()
    for broker, number in queues:
        queue = {"brokerName": broker, "queueId": number, "topic": query.topic}
        assignments.append({"messageQueue": queue, "mode": mode.mode})
        if budget.is_over():
            yield
    return reply(command, body=orjson.dumps({"messageQueueAssignments": assignments}))


def _read_queues(own_name: str, grant: ConsumeGrant, elsewhere: Sequence[TopicQueues]) -> dict[str, int]:
    """Return the number of the topic's readable queues by broker; name servers may not know this broker yet."""
    counts = {
        queues.broker_name: queues.read_queues for queues in elsewhere if queues.perm & READ and queues.read_queues > 0
    }
    counts.pop(own_name, None)
    own = grant.open_topic()
    if own is not None and own.perm & READ and own.read_queues:
        counts[own_name] = own.read_queues
    return counts


def _share(members: Members, mode: RequestMode, query: AssignmentQuery, total: int) -> Steps[Sequence[int] | None]:
    """Return the client's share of *total* queues; `EVERY_BROKER` if it pops all, None if that cannot be decided."""
    if query.model == BROADCASTING:
        return range(total)
    group, strategy = members.group(query.group), STRATEGIES.get(query.strategy)
    if group is None or strategy is None or not query.client_id.strip():
        return None
    ids = group.sorted_ids()
    if mode.mode == POP and (mode.shared <= 0 or mode.shared >= len(ids) - 1):
        return EVERY_BROKER
    if mode.mode == PULL or query.client_id not in ids:
        return strategy.allocate(query.group, query.client_id, range(total), ids)
    number = ids.index(query.client_id)
    if len(ids) > total:
        return (number % total,)
    found: list[int] = []
    budget = Budget(ID_US)
    for more in range(mode.shared + 1):
        found += strategy.allocate(query.group, ids[(number + more) % len(ids)], range(total), ids)
        if budget.is_over(len(ids)):
            yield
    return found


def set_request_mode(context: RequestContext, command: Command) -> Steps[bytes]:
    """Set whether a group pulls or pops a topic."""
    body = yield from read_body(command)
    group, topic = text(body, "consumerGroup"), text(body, "topic")
    if not group or not topic:
        raise Refused(Reason.MALFORMED, "request mode update lacks consumerGroup or topic; send both")
    grant = context.gate(command).admin.group(group)
    if topic.startswith(RETRY_PREFIX):
        raise Refused(Reason.NO_PERMISSION, "retry topic is not allowed to set mode")
    if grant.topic_offsets(topic).get() is None:
        raise Refused(Reason.NO_TOPIC, f"topic[{topic}] not exist")
    if grant.ensure() is None:
        raise Refused(Reason.NO_GROUP, f"subscription group [{group}] does not exist")
    mode = enum_name(body, "mode", MODES, PULL)
    if mode not in MODES:
        raise Refused(Reason.MALFORMED, f"mode {mode!r} is unknown; it must be one of {', '.join(MODES)}")
    shared = max(min(integer(body, "popShareQueueNum"), SHARED_MAX), ANY_QUEUE)
    context.state.request_modes.set(topic, group, RequestMode(mode, shared))
    return reply(command)


def all_request_modes(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the modes that were set, by topic and group."""
    context.gate(command).queries.broker("list")
    return reply_in_pieces(command, (yield from context.state.request_modes.json_in_steps()))


TABLE: Final[dict[int, Handle]] = {
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: all_request_modes,
    RequestCode.QUERY_ASSIGNMENT: query_assignment,
    RequestCode.SET_MESSAGE_REQUEST_MODE: saved(set_request_mode),
}
