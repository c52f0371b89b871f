"""External transactions: Martlet's own requests for clients that coordinate transactions themselves, such as Spark.

docs/remoting.md has the fields. Each request can be repeated after a lost answer.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import orjson
from msgspec.structs import asdict

from martlet.broker import Broker
from martlet.contracts import ExternalTransaction, ExternalTransactions, StagedBatch
from martlet.errors import Reason, Refused
from martlet.message import PROPERTIES_BYTES_MAX
from martlet.runtime.steps import Steps
from martlet.tables.topics import RETRY_PREFIX
from martlet_remoting.handlers.bodies import read_body
from martlet_remoting.handlers.context import Handle, RequestContext, reply
from martlet_remoting.handlers.send import I32_MAX, I32_MIN, TRANSACTION_MASK, check_load, open_topic
from martlet_remoting.handlers.unheld import no_external_transactions
from martlet_remoting.wire.batches import Member, split_batch
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.headers import decode_send_header
from martlet_remoting.wire.packets import Command

__all__ = ["TABLE"]

T = TypeVar("T")

# Members of a batch that are split in one slice.
SPLIT_AT_ONCE: Final = 1024
LISTED_MAX: Final = 500
# Bytes of a batch besides the body of its only message: properties and lengths.
BATCH_OVERHEAD: Final = PROPERTIES_BYTES_MAX + 64


def _check_supported(broker: Broker) -> ExternalTransactions:
    found = broker.capability(ExternalTransactions)
    if found is None:
        raise no_external_transactions(broker)
    return found


def _transaction(command: Command) -> ExternalTransaction:
    name, content = command.text("producer"), command.text("content", "")
    return ExternalTransaction(name, command.integer("epoch"), command.integer("sequence"), content=content)


# runs


async def begin(context: RequestContext, command: Command) -> bytes:
    """Begin a run of a producer; the answer has its epoch."""
    _check_supported(context.state.broker)
    brokers = [name for name in command.text("brokers", "").split(",") if name]
    began_ms = command.integer("began", 0)
    producer, name, only_known = command.text("producer"), command.text("run"), _is_true(command, "known")
    topic = command.text("topic", "")
    gate = context.gate(command)
    run = await gate.external.begin(producer, name, topic, began_ms, brokers, only_known=only_known)
    ext = {"epoch": run.epoch, "committed": run.committed, "prepared": run.prepared, "brokers": ",".join(run.brokers)}
    if run.content:
        ext["content"] = run.content
    return reply(command, ext)


# staging


async def stage(context: RequestContext, command: Command) -> bytes:
    """Stage a batch; the answer is sent once the batch is durable."""
    state = context.state
    _check_supported(state.broker)
    header, transaction = decode_send_header(command), _transaction(command)
    limit = state.broker.config.message_bytes_max
    if len(command.body) > limit + BATCH_OVERHEAD:  # a batch of one message of the largest size fits
        raise Refused(Reason.ILLEGAL, f"batch is {len(command.body)} bytes; broker.message_bytes_max is {limit}")
    if header.sys_flag & TRANSACTION_MASK or not I32_MIN <= header.sys_flag <= I32_MAX:
        text = f"sysFlag {header.sys_flag} is of another transaction or does not fit 32 bits"
        raise Refused(Reason.PARAMETER, f"{text}; send 0, or the bits of a compressed body")
    if header.topic.startswith(RETRY_PREFIX):
        raise Refused(Reason.ILLEGAL, f"topic[{header.topic}] is of retries; stage messages for another topic")
    gate = context.gate(command)
    grant = gate.check_publish(header.topic, before_publish=True)
    members = await state.broker.turns.finish(_split(command.body))
    open_topic(context, grant, header)
    check_load(grant, state.config.unflushed_bytes_max)
    batch = StagedBatch(header.topic, header.queue_id, members, header.sys_flag, header.born_ms, context.peer.host)
    staged = await gate.external.stage(transaction, command.text("part"), command.integer("chunk"), batch)
    context.peer.hold_until(staged.end)
    return reply(command, {"chunks": staged.chunks, "committed": _text(staged.is_committed)})


def _split(body: bytes) -> Steps[Sequence[Member]]:
    members: list[Member] = []
    for some in split_batch(body, SPLIT_AT_ONCE):
        members += some
        if len(some) == SPLIT_AT_ONCE:
            yield
    return members


def _is_true(command: Command, name: str) -> bool:
    return command.text(name, "") == "true"


def _text(value: bool) -> str:
    return "true" if value else "false"


# the outcome


async def prepare(context: RequestContext, command: Command) -> bytes:
    """Keep parts of a transaction until its commit, even if another run begins."""
    _check_supported(context.state.broker)
    transaction = _transaction(command)
    parts = await _parts(context, command, _commit_part)
    topic, is_last = command.text("topic", ""), _is_true(command, "last")
    done = await context.gate(command).external.prepare(transaction, parts or (), topic, is_last=is_last)
    return reply(command, {"committed": done.sequence, "duplicate": _text(done.is_duplicate)})


async def commit(context: RequestContext, command: Command) -> bytes:
    """Commit a transaction; the answer is sent once all its messages are readable."""
    _check_supported(context.state.broker)
    transaction = _transaction(command)
    parts = await _parts(context, command, _commit_part)
    wanted = None if _is_true(command, "prepared") else parts or ()
    topic, is_last = command.text("topic", ""), _is_true(command, "last")
    done = await context.gate(command).external.commit(transaction, wanted, topic, is_last=is_last)
    ext = {"committed": done.sequence, "duplicate": _text(done.is_duplicate), "messages": done.messages}
    return reply(command, ext)


def _commit_part(item: object) -> tuple[str, int]:
    if isinstance(item, list) and len(item) == 2 and type(item[0]) is str and type(item[1]) is int:
        return item[0], item[1]
    raise _malformed('{"parts": [["name", chunks], ...]}')


async def abort(context: RequestContext, command: Command) -> bytes:
    """Drop parts of a transaction."""
    _check_supported(context.state.broker)
    transaction = _transaction(command)
    gate, parts = context.gate(command), await _parts(context, command, _abort_part)
    if _is_true(command, "prepared"):
        return reply(command, {"dropped": await gate.external.abort_prepared(transaction)})
    return reply(command, {"dropped": await gate.external.abort(transaction, parts)})


def _abort_part(item: object) -> str:
    if isinstance(item, str):
        return item
    raise _malformed('{"parts": ["name", ...]}')


async def _parts(context: RequestContext, command: Command, part: Callable[[object], T]) -> list[T] | None:
    """Return the list ``parts`` of the JSON object in the body; None if there is none."""
    if not command.body:
        return None
    found = (await context.state.broker.turns.finish(read_body(command))).get("parts")
    if found is None:
        return None
    if not isinstance(found, list):
        raise _malformed('{"parts": [...]}')
    return [part(item) for item in found]


def _malformed(form: str) -> Refused:
    return Refused(Reason.MALFORMED, f"body of the request is not valid; send {form}")


# statistics for operators


def list_external(context: RequestContext, command: Command) -> Steps[bytes]:
    """List the producers after a given one, with their staged and committed transactions."""
    context.gate(command).check("update", "")
    found = _check_supported(context.state.broker)
    after = command.text("identity", ""), command.text("producer", "")
    count = min(max(command.integer("count", LISTED_MAX), 1), LISTED_MAX)
    rows = yield from found.producers(after, count)
    return reply(command, body=orjson.dumps({"producers": [asdict(row) for row in rows]}))


TABLE: Final[dict[int, Handle]] = {
    RequestCode.BEGIN_EXTERNAL_TRANSACTIONS: begin,
    RequestCode.STAGE_EXTERNAL_MESSAGES: stage,
    RequestCode.PREPARE_EXTERNAL_TRANSACTION: prepare,
    RequestCode.COMMIT_EXTERNAL_TRANSACTION: commit,
    RequestCode.ABORT_EXTERNAL_TRANSACTION: abort,
    RequestCode.LIST_EXTERNAL_TRANSACTIONS: list_external,
}
