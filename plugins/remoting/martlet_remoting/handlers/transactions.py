"""END_TRANSACTION and RESUME_CHECK_HALF_MESSAGE (RocketMQ EndTransactionProcessor, AdminBrokerProcessor).

Clients send END_TRANSACTION oneway, so the codes are seen only by those that ask for an answer.
"""

from typing import Final

from martlet.access import Gate
from martlet.broker import Broker
from martlet.contracts import HalfMessage, Transactions
from martlet.errors import Reason, Refused
from martlet_remoting.codes import RequestCode, ResponseCode
from martlet_remoting.context import Answer, Context, Declined, Handle, Later, reply
from martlet_remoting.packets import Command

__all__ = ["TABLE"]

# The values of commitOrRollback; any other leaves the transaction pending (MessageSysFlag).
COMMIT: Final = 0x8
ROLLBACK: Final = 0xC
MESSAGE_ID_CHARS: Final = (32, 56)  # address with port, and position, for IPv4 and IPv6
POSITION_CHARS: Final = 16


def _transactions(broker: Broker) -> Transactions:
    found = broker.capability(Transactions)
    if found is None:
        text = f"the broker[{broker.config.name}] does not support transactional messages"
        raise Declined(ResponseCode.NO_PERMISSION, f"{text}; add the plugin tx to plugins.enabled")
    return found


def end_transaction(context: Context, command: Command) -> Answer:
    """Commit a transaction or roll it back; the answer is sent when that is durable."""
    transactions = _transactions(context.state.broker)
    if command.integer("commitOrRollback") not in (COMMIT, ROLLBACK):
        return None  # as RocketMQ, which does not answer
    offset, position = command.integer("tranStateTableOffset"), command.integer("commitLogOffset")
    half = transactions.find_nowait(offset, position)
    if half is None:
        return Later(_end_far(context, command, transactions, position))
    return _end(context, command, transactions, half)


async def _end_far(context: Context, command: Command, transactions: Transactions, position: int) -> bytes:
    return _end(context, command, transactions, await _find(transactions, position))


async def _find(transactions: Transactions, position: int) -> HalfMessage:
    try:
        return await transactions.find(position)
    except Refused as refused:
        raise _as_rocketmq(refused) from refused


def _as_rocketmq(refused: Refused) -> Refused | Declined:
    if refused.reason is Reason.NOT_FOUND:
        return Declined(ResponseCode.SYSTEM_ERROR, str(refused))
    return refused


def _end(context: Context, command: Command, transactions: Transactions, half: HalfMessage) -> bytes:
    _check(command, transactions, half)
    gate = context.gate(command)
    try:
        end = gate.end_transaction(half, commit=command.integer("commitOrRollback") == COMMIT)
    except Refused as refused:
        raise _as_rocketmq(refused) from refused
    context.peer.hold_until(end)
    return reply(command)


def _check(command: Command, transactions: Transactions, half: HalfMessage) -> None:
    """Raise `Declined` unless *command* is from the group of the producer and names *half* in each field."""
    if not command.boolean("fromTransactionCheck") and transactions.is_late(half):
        text = "transaction is older than its CHECK_IMMUNITY_TIME_IN_SECONDS; answer the broker's check instead"
        raise Declined(ResponseCode.ILLEGAL_OPERATION, text)
    group, offset = command.text("producerGroup"), command.integer("tranStateTableOffset")
    if group != half.group:
        text = f"The producer group wrong; the message is of group {half.group!r}, the request of {group!r:.260}"
        raise Declined(ResponseCode.SYSTEM_ERROR, text)
    if offset != half.record.queue_offset:
        text = f"The transaction state table offset wrong; it is {half.record.queue_offset}, the request has {offset}"
        raise Declined(ResponseCode.SYSTEM_ERROR, text)


def resume_check(context: Context, command: Command) -> Later:
    """Check a transaction again from the first time, pending or parked."""
    transactions = _transactions(context.state.broker)
    position = _position(command.text("msgId"))
    return Later(_resume(context, command, context.gate(command), transactions, position))


async def _resume(context: Context, command: Command, gate: Gate, transactions: Transactions, position: int) -> bytes:
    half = await _find(transactions, position)
    try:
        end = gate.resume_transaction(half)
    except Refused as refused:
        raise _as_rocketmq(refused) from refused
    context.peer.hold_until(end)
    return reply(command)


def _position(message_id: str) -> int:
    """Return the log position in an offset message id."""
    try:
        bytes.fromhex(message_id)
        if len(message_id) in MESSAGE_ID_CHARS:
            return int(message_id[-POSITION_CHARS:], 16)
    except ValueError:
        pass
    text = f"msgId {message_id!r:.80} is not an offset message id; send the 32 hexadecimal digits of the stored message"
    raise Declined(ResponseCode.SYSTEM_ERROR, text)


TABLE: Final[dict[int, Handle]] = {
    RequestCode.END_TRANSACTION: end_transaction,
    RequestCode.RESUME_CHECK_HALF_MESSAGE: resume_check,
}
