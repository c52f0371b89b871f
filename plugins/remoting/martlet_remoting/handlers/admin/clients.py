"""Lists of connected clients, and requests relayed to a client (RocketMQ callConsumer, Broker2Client)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, final

from martlet.errors import Refused
from martlet.runtime.steps import Budget, Steps
from martlet_remoting.consumers.members import RegisteredClient
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, refuse, reply, reply_in_pieces
from martlet_remoting.handlers.sendback import found_record
from martlet_remoting.wire.codec import encode_response
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.fastjson import Lazy, LazyList, dumps, dumps_in_steps, read
from martlet_remoting.wire.packets import Command, Frame

__all__ = ["TABLE"]

VERSION_3_0_7: Final = 28  # first version of clients that can reset offsets and report their status on request
VERSION_3_1_8: Final = 62  # first version of clients that report their state
REQUEST_US: Final = 20.0  # to encode and send
GATHERED_BYTES_MAX: Final = 8 << 20  # of the answers of all members of a group; clients accept frames of up to 16 MiB
MESSAGE_ID_CHARS: Final = (32, 56)  # of IPv4 and IPv6 brokers; the last 16 are the position


def _connections(members: Iterable[RegisteredClient]) -> Iterator[dict[str, object]]:
    for member in members:
        yield {
            "clientAddr": member.connection.peer.address,
            "clientId": member.client_id,
            "language": member.language or "OTHER",
            "version": member.version,
        }


def consumer_connections(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the live members of a consumer group and their subscriptions."""
    name = command.text("consumerGroup")
    context.gate(command).queries.group(name)
    group = context.state.members.group(name)
    if group is None:
        raise Declined(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
    subscriptions = list(group.subscriptions.items())
    body = {
        "connectionSet": LazyList(_connections(list(group.members.values()))),
        "consumeFromWhere": group.from_where,
        "consumeType": group.kind,
        "messageModel": group.model,
        "subscriptionTable": Lazy((topic, held.as_json()) for topic, held in subscriptions),
    }
    return reply_in_pieces(command, (yield from dumps_in_steps(body)))


def producer_connections(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the live members of a producer group."""
    name = command.text("producerGroup")
    context.gate(command).queries.broker("list")
    members = context.state.members.producers.get(name)
    if not members:
        raise Declined(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
    body = {"connectionSet": LazyList(_connections(list(members.values())))}
    return reply_in_pieces(command, (yield from dumps_in_steps(body)))


def all_producers(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer all live producers by group."""
    context.gate(command).queries.broker("list")
    groups = list(context.state.members.producers.items())
    table = Lazy((name, LazyList(_producers(list(members.values())))) for name, members in groups)
    return reply_in_pieces(command, (yield from dumps_in_steps({"data": table})))


def _producers(members: Iterable[RegisteredClient]) -> Iterator[dict[str, object]]:
    for member in members:
        yield {
            "clientId": member.client_id,
            "language": member.language or "OTHER",
            "lastUpdateTimestamp": member.seen_ms,
            "remoteIP": member.connection.peer.address,
            "version": member.version,
        }


# relayed to a client


def _member(context: RequestContext, command: Command) -> RegisteredClient:
    """Return the client in a request's clientId; without one, any member of the group."""
    name, client_id = command.text("consumerGroup"), command.text("clientId", "")
    group = context.state.members.group(name)
    member = None
    if group is not None:
        member = group.find(client_id) if client_id else next(iter(group.members.values()), None)
    if member is None:
        raise Declined(ResponseCode.SYSTEM_ERROR, f"The Consumer <{name}> <{client_id}> not online")
    if member.version < VERSION_3_1_8:
        text = f"The Consumer <{name}> <{client_id}> Version <{member.version}> too low to finish"
        raise Declined(ResponseCode.SYSTEM_ERROR, f"{text}, please upgrade it to 3.1.8 or later")
    return member


def _pass_on(context: RequestContext, command: Command, ext: dict[str, object], body: bytes) -> None:
    """Relay *command* to the client, and the client's answer to the requester."""
    member = _member(context, command)

    def answered(answer: Command | None) -> None:
        if answer is None:
            text = f"consumer <{command.text('consumerGroup')}> <{member.client_id}> did not answer in time"
            context.answer(command, refuse(command, ResponseCode.CONSUME_MSG_TIMEOUT, text))
        else:
            frame = encode_response(command.opaque, answer.code, answer.ext, answer.body, answer.remark)
            context.answer(command, frame)

    member.connection.ask(command.code, ext, body, answered)


def running_info(context: RequestContext, command: Command) -> None:
    """Relay a request for a consumer's state."""
    context.gate(command).admin.group(command.text("consumerGroup"))
    _pass_on(context, command, dict(command.ext), command.body)


async def consume_directly(context: RequestContext, command: Command) -> None:
    """Relay a stored message to one consumer, and answer the result of its consumption."""
    context.gate(command).admin.group(command.text("consumerGroup"))
    message_id = command.text("msgId", "")
    ext = {**command.ext, "brokerName": context.state.broker.config.name}
    if not message_id:
        _pass_on(context, command, ext, command.body)
        return
    position = _position(message_id)
    data = await context.gate(command).queries.record_at(position)
    record = found_record(data, position)
    assert data is not None
    _pass_on(context, command, ext, data[: record.size])


def _position(message_id: str) -> int:
    """Return the log position in an offset message id."""
    try:
        if len(message_id) not in MESSAGE_ID_CHARS:
            raise ValueError
        return int(message_id[-16:], 16)
    except ValueError:
        text = f"msgId {message_id!r:.80} is not an offset message id; it must be 32 or 56 hexadecimal digits"
        raise Declined(ResponseCode.SYSTEM_ERROR, text) from None


@final
class _Gathering:
    """Collects the answers of several clients, up to the size limit of one answer."""

    def __init__(self, waiting: int, done: Callable[[dict[str, bytes]], None]) -> None:
        self._waiting = waiting
        self._done = done
        self._found: dict[str, bytes] = {}
        self._left = GATHERED_BYTES_MAX

    def take(self, client_id: str, answer: Command | None) -> None:
        """Add the answer of one client; None if it will not answer."""
        if answer is not None and answer.code == ResponseCode.SUCCESS and 0 < len(answer.body) <= self._left:
            self._left -= len(answer.body)
            self._found[client_id] = answer.body
        self._waiting -= 1
        if not self._waiting:
            self._done(self._found)


def consumer_status(context: RequestContext, command: Command) -> Steps[None]:
    """Ask all members of a group, or one member, for their offsets in each queue."""
    topic, name, client_id = command.text("topic"), command.text("group"), command.text("clientAddr", "")
    context.gate(command).admin.group(name)
    group = context.state.members.group(name)
    if group is None:
        raise Declined(ResponseCode.SYSTEM_ERROR, f"No Any Consumer online in the consumer group: [{name}]")
    members = [member for member in group.members.values() if not client_id or member.client_id == client_id]
    for member in members:
        if member.version < VERSION_3_0_7:
            text = f"the client does not support this feature. version={member.version}"
            raise Declined(ResponseCode.SYSTEM_ERROR, text)

    def done(answers: dict[str, bytes]) -> None:
        try:
            context.peer.start(_answer_status, context, command, answers)
        except Refused as error:
            context.answer(command, refuse(command, ResponseCode.SYSTEM_BUSY, str(error)))

    if not members:
        context.answer(command, reply(command, body=dumps({"consumerTable": {}})))
        return
    gathering = _Gathering(len(members), done)
    budget = Budget(REQUEST_US)
    for member in members:
        _ask_status(member, {"group": name, "topic": topic}, gathering)
        if budget.is_over():
            yield


async def _answer_status(context: RequestContext, command: Command, found: dict[str, bytes]) -> None:
    body = await context.state.broker.turns.finish(_status_table(found))
    context.answer(command, reply_in_pieces(command, body))


def _status_table(found: dict[str, bytes]) -> Steps[list[bytes]]:
    tables: dict[str, object] = {}
    for client_id, data in found.items():
        try:
            table = yield from read(data)
        except ValueError:
            continue
        if isinstance(table, dict):
            tables[client_id] = table.get("messageQueueTable") or {}
        yield
    return (yield from dumps_in_steps({"consumerTable": tables}))


def _ask_status(member: RegisteredClient, ext: dict[str, object], gathering: _Gathering) -> None:
    client_id = member.client_id
    try:
        member.connection.ask(
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, ext, b"", lambda answer: gathering.take(client_id, answer)
        )
    except Refused:
        gathering.take(client_id, None)


TABLE: Final[dict[int, Handle]] = {
    RequestCode.GET_CONSUMER_CONNECTION_LIST: consumer_connections,
    RequestCode.GET_PRODUCER_CONNECTION_LIST: producer_connections,
    RequestCode.GET_ALL_PRODUCER_INFO: all_producers,
    RequestCode.GET_CONSUMER_RUNNING_INFO: running_info,
    RequestCode.CONSUME_MESSAGE_DIRECTLY: consume_directly,
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: consumer_status,
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: consumer_status,
}
