"""Stages rows invisibly and commits them: the sink's guarantees ``exactly-once`` and ``idempotent``.

On the brokers these are external transactions (docs/remoting.md). A producer commits each of its sequences once. A part
is the list of numbered chunks that a task stages at a broker; a commit names the parts that count, and drops the
others. All requests may be repeated.

A transaction on several brokers is prepared on all of them but the first, and then committed on the first, which
decides it, and on the others. A later run asks all brokers of the producer (`runs`) and ends unfinished transactions.

After a crash only the last committed transaction can be repeated. Its rows are compared by a digest that brokers keep
with the commit: a query with an outdated checkpoint numbers other rows with the same numbers.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final
from uuid import uuid4

import orjson

from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import BUSY, Cluster
from martlet_spark.connection import ConnectionBroken, attempts
from martlet_spark.errors import WriteError
from martlet_spark.write.content import NO_CONTENT, Content, content_of
from martlet_spark.write.runs import NO_RUN, Transaction, ask, begin, explained, refused
from martlet_spark.write.sending import WINDOW, Lane, SendRequest, refusal, send_fields
from martlet_spark.write.targets import BatchBody, QueueTurns

__all__ = ["RepeatedTransaction", "Staging", "TaskPart", "Transaction", "abort", "commit"]

log = logging.getLogger("martlet.spark")

OLDER: Final = "the checkpoint was restored or copied, or belongs to a second query"


@final
@dataclass(frozen=True, slots=True)
class TaskPart:
    """The part *name* of one task, staged at the broker of *queue* in *chunks* requests.

    *epoch* is the run's epoch there; *brokers* are all brokers known to the task that the producer may write to.
    """

    transaction: Transaction
    queue: MessageQueue
    name: str
    epoch: int
    chunks: int = 0
    brokers: frozenset[str] = frozenset()


@final
@dataclass(frozen=True, slots=True)
class RepeatedTransaction:
    """A transaction that an older run has committed; *content* is its digest, empty if it was committed without one."""

    transaction: Transaction
    content: str

    def check(self, content: Content, *, may_change: bool) -> None:
        """Fail if the repeated rows have another *content*; if they *may_change*, only log it.

        Raises:
          WriteError: the rows differ from the committed ones.
        """
        if self.content in ("", str(content)):
            return
        before, now = self.content.partition("-")[0], content.rows
        text = f"{self.transaction} was written before with other rows ({before} rows then, {now} now)"
        if may_change:
            log.warning("%s; keeping those", text)
            return
        hint = "set the option changingRows to true to keep what was written"
        why = f"{OLDER}, or a function changes its result, such as rand()"
        raise WriteError(f"{text}: {why}; {self.transaction.anew}, or {hint}")


@final
class _Stage:
    """One part while it is staged. Chunks are numbered, so chunks without an answer can be sent again."""

    def __init__(self, cluster: Cluster, part: TaskPart) -> None:
        self.part = part
        self.lane = Lane(cluster, part.queue.broker_name)
        self.is_committed = False
        self.again: list[SendRequest] = []


@final
class Staging:
    """Stages the chunks of one task, at each broker as a part of its own.

    If an older run has committed the transaction, nothing is staged, and ``repeated`` is set. *retired* brokers are not
    asked about it. ``content`` is the digest of all rows.

    Raises:
      WriteError: a broker does not offer transactions, refuses the rows, has a newer run or a later transaction, or
        does not answer in time.
    """

    def __init__(
        self, cluster: Cluster, turns: QueueTurns, transaction: Transaction, retired: frozenset[str] = frozenset()
    ) -> None:
        self._cluster = cluster
        self._turns = turns
        self._transaction = transaction
        self._retired = retired
        self._run = NO_RUN
        self._topics: set[str] = set()  # topics at all of whose brokers the run has begun
        self._stages: dict[str, _Stage] = {}
        self._tries = attempts(cluster.timeout_s)
        self.content = NO_CONTENT
        self.repeated: RepeatedTransaction | None = None

    def write(self, chunk: BatchBody) -> None:
        """Stage *chunk*; return before it is confirmed."""
        self.content += content_of(chunk.body)
        if self._transaction.run and chunk.place.topic not in self._topics:
            self._begin(chunk.place.topic)
        if self.repeated is not None:
            return
        queue = self._turns.next_queue(chunk.place)
        stage = self._stages.get(queue.broker_name)
        if stage is None:
            stage = self._stages[queue.broker_name] = _Stage(self._cluster, self._part(queue))
        while len(stage.lane.unanswered) >= WINDOW:
            self._settle(stage)
        if stage.is_committed:
            return
        part = stage.part
        ext = {
            **send_fields(queue, batch=True),
            "producer": part.transaction.producer,
            "epoch": part.epoch,
            "sequence": part.transaction.sequence,
            "part": part.name,
            "chunk": part.chunks,
        }
        stage.part = replace(part, chunks=part.chunks + 1)
        stage.again = [
            SendRequest(RequestCode.STAGE_EXTERNAL_MESSAGES, ext, chunk.body, queue, chunk.place, chunk.count)
        ]
        self._post(stage)

    def finish(self) -> list[TaskPart]:
        """Return the parts once all chunks are confirmed."""
        for stage in self._stages.values():
            while stage.lane.unanswered:
                self._settle(stage)
            stage.lane.release()
        return [stage.part for stage in self._stages.values() if stage.part.chunks and not stage.is_committed]

    def close(self) -> None:
        """Close the connections that have unanswered requests."""
        for stage in self._stages.values():
            stage.lane.drop()

    def _begin(self, topic: str) -> None:
        brokers = frozenset(queue.broker_name for queue in self._turns.queues_of(topic))
        self._run = begin(self._cluster, self._transaction, topic, brokers, self._retired)
        self._topics.add(topic)
        if self._run.committed > self._transaction.sequence:
            text = f"{self._transaction} is older than {self._run.committed}, the last one that was written: {OLDER}"
            raise WriteError(f"{text}, and its rows would be missing; {self._transaction.anew}")
        if self._run.committed == self._transaction.sequence:
            self.repeated = RepeatedTransaction(self._transaction, self._run.content)

    def _part(self, queue: MessageQueue) -> TaskPart:
        epoch = self._run.epochs.get(queue.broker_name, 0)
        return TaskPart(self._transaction, queue, uuid4().hex, epoch, 0, self._run.brokers)

    def _post(self, stage: _Stage) -> None:
        """Send the requests that were not sent yet, or must be sent again."""
        while stage.again:
            try:
                stage.lane.post(stage.again[0])
            except ConnectionBroken as error:
                stage.again = [*stage.lane.drop(), *stage.again]
                self._failed(stage, str(error))
            else:
                stage.again.pop(0)

    def _settle(self, stage: _Stage) -> None:
        """Wait for an answer; if none arrives, queue all unanswered requests again."""
        try:
            request, answer = stage.lane.receive()
        except ConnectionBroken as error:
            stage.again = stage.lane.drop()
            self._failed(stage, str(error))
        else:
            if answer.code in BUSY:
                stage.again = [request, *stage.lane.drop()]
                self._failed(stage, refusal(request, answer))
            elif answer.code != ResponseCode.SUCCESS:
                raise WriteError(explained(refusal(request, answer), answer))
            else:
                stage.is_committed = stage.is_committed or answer.ext.get("committed") == "true"
                self._tries = attempts(self._cluster.timeout_s)
        self._post(stage)

    def _failed(self, stage: _Stage, why: str) -> None:
        if next(self._tries, None) is None:
            text = f"broker {stage.part.queue.broker_name!r} confirmed no message for {self._cluster.timeout_s:g} s"
            raise WriteError(f"{text}: {why}")


def commit(
    cluster: Cluster, parts: Sequence[TaskPart], retired: frozenset[str] = frozenset(), content: Content | None = None
) -> None:
    """Commit *parts*, whose digest is *content*, on all of their brokers; return once their messages are readable.

    Raises:
      WriteError: a broker refuses or does not answer. Others may have committed: repeat the call, or begin a new run.
    """
    by_broker = _by_broker(parts)
    brokers = frozenset().union(*[part.brokers for part in parts])
    if any(part.brokers != brokers for part in parts):
        # Tasks with other topics know other brokers: each broker has to know all of them before one commits.
        begin(cluster, parts[0].transaction, parts[0].queue.topic, brokers, retired)
    for first, names in by_broker[1:]:
        _end(cluster, RequestCode.PREPARE_EXTERNAL_TRANSACTION, first, names, content)
    for first, names in by_broker:
        _end(cluster, RequestCode.COMMIT_EXTERNAL_TRANSACTION, first, names, content)


def _end(cluster: Cluster, code: int, first: TaskPart, parts: Sequence[TaskPart], content: Content | None) -> None:
    body = orjson.dumps({"parts": [[part.name, part.chunks] for part in parts]})
    fields = first.transaction.fields(first.epoch, str(content or ""))
    answer = ask(cluster, first.queue, code, fields, body)
    if answer.code != ResponseCode.SUCCESS:
        raise WriteError(refused("commit", first.queue, answer))


def abort(cluster: Cluster, parts: Sequence[TaskPart]) -> None:
    """Drop *parts* unless they were prepared or committed; brokers drop remaining ones at the next commit, or later."""
    for first, names in _by_broker(parts):
        body = orjson.dumps({"parts": [part.name for part in names]})
        fields = first.transaction.fields(first.epoch)
        ask(cluster, first.queue, RequestCode.ABORT_EXTERNAL_TRANSACTION, fields, body)


def _by_broker(parts: Sequence[TaskPart]) -> list[tuple[TaskPart, list[TaskPart]]]:
    found: dict[str, list[TaskPart]] = {}
    for part in parts:
        found.setdefault(part.queue.broker_name, []).append(part)
    return [(found[broker][0], found[broker]) for broker in sorted(found)]
