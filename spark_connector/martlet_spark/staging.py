"""Stages rows invisibly and commits them: the sink's guarantees ``exactly-once`` and ``idempotent``.

The brokers' side are external transactions (docs/remoting.md). A producer commits each of its sequences once. What a
task stages at a broker is a part, a list of numbered chunks; a commit names the parts that count and drops the others.
All requests may be repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final
from uuid import uuid4

import orjson

from martlet_remoting.codes import RESPONSE_NAMES, RequestCode, ResponseCode
from martlet_remoting.packets import MessageQueue
from martlet_spark.cluster import Cluster
from martlet_spark.connection import CONNECTIONS, Answer, ConnectionLost, attempts
from martlet_spark.errors import WriteError
from martlet_spark.sending import RETRIED, WINDOW, Lane, Request, refusal, send_fields
from martlet_spark.targets import Chunk, Turns
from martlet_spark.writable import master

__all__ = ["Part", "Staging", "Transaction", "abort", "commit"]

# A commit of many messages takes long, and the broker answers once all of them are readable.
COMMIT_S: Final = 60.0
OTHERS: Final = "; set the option guarantee to at-least-once, with which rows may be written twice"

# The epochs of runs, by their broker's address, so that each worker asks once: (address, producer, run) -> epoch.
_epochs: dict[tuple[str, str, str], int] = {}


@final
@dataclass(frozen=True, slots=True)
class Transaction:
    """The rows that *producer* commits as *sequence*; older runs of it are fenced. Without a *run* nothing is."""

    producer: str
    sequence: int
    run: str = ""


@final
@dataclass(frozen=True, slots=True)
class Part:
    """What one task has staged at the broker of *queue*, as *name*: *chunks* requests; 0 if it had been committed."""

    transaction: Transaction
    queue: MessageQueue
    name: str
    epoch: int
    chunks: int = 0


@final
class _Stage:
    """One part while it is staged. Chunks are numbered, so that those without an answer are simply sent again."""

    def __init__(self, cluster: Cluster, part: Part) -> None:
        self.part = part
        self.lane = Lane(cluster, part.queue.broker_name)
        self.is_committed = False
        self.again: list[Request] = []


@final
class Staging:
    """Stages the chunks of one task, at each broker as a part of its own.

    Raises:
      WriteError: a broker does not offer transactions, refuses the rows, has a newer run, or does not answer in time.
    """

    def __init__(self, cluster: Cluster, turns: Turns, transaction: Transaction) -> None:
        self._cluster = cluster
        self._turns = turns
        self._transaction = transaction
        self._stages: dict[str, _Stage] = {}
        self._tries = attempts(cluster.timeout_s)

    def write(self, chunk: Chunk) -> None:
        """Stage *chunk*; return before it is confirmed."""
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
        stage.again = [Request(RequestCode.STAGE_EXTERNAL_MESSAGES, ext, chunk.body, queue, chunk.place, chunk.count)]
        self._post(stage)

    def finish(self) -> list[Part]:
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

    def _part(self, queue: MessageQueue) -> Part:
        transaction = self._transaction
        epoch = _begin(self._cluster, queue, transaction) if transaction.run else 0
        return Part(transaction, queue, uuid4().hex, epoch)

    def _post(self, stage: _Stage) -> None:
        """Send the requests that are to be sent (again)."""
        while stage.again:
            try:
                stage.lane.post(stage.again[0])
            except ConnectionLost as error:
                stage.again = [*stage.lane.drop(), *stage.again]
                self._failed(stage, str(error))
            else:
                stage.again.pop(0)

    def _settle(self, stage: _Stage) -> None:
        """Wait for an answer; if there is none, send everything again that has none."""
        try:
            request, answer = stage.lane.receive()
        except ConnectionLost as error:
            stage.again = stage.lane.drop()
            self._failed(stage, str(error))
        else:
            if answer.code in RETRIED:
                stage.again = [request, *stage.lane.drop()]
                self._failed(stage, refusal(request, answer))
            elif answer.code != ResponseCode.SUCCESS:
                raise WriteError(_explained(refusal(request, answer), answer))
            else:
                stage.is_committed = stage.is_committed or answer.ext.get("committed") == "true"
                self._tries = attempts(self._cluster.timeout_s)
        self._post(stage)

    def _failed(self, stage: _Stage, why: str) -> None:
        if next(self._tries, None) is None:
            text = f"broker {stage.part.queue.broker_name!r} confirmed no message for {self._cluster.timeout_s:g} s"
            raise WriteError(f"{text}: {why}")


def commit(cluster: Cluster, parts: Sequence[Part]) -> None:
    """Commit *parts*, at each broker on its own; return once all of their messages are readable.

    Raises:
      WriteError: a broker refuses or does not answer. Other brokers may have committed; repeat the commit.
    """
    for first, names in _by_broker(parts):
        body = orjson.dumps({"parts": [[part.name, part.chunks] for part in names]})
        answer = _ask(cluster, first.queue, RequestCode.COMMIT_EXTERNAL_TRANSACTION, _fields(first), body)
        if answer.code != ResponseCode.SUCCESS:
            raise WriteError(_refused("commit", first.queue, answer))


def abort(cluster: Cluster, parts: Sequence[Part]) -> None:
    """Drop *parts* unless they were committed; brokers drop what is left at the next commit, or after a while."""
    for first, names in _by_broker(parts):
        body = orjson.dumps({"parts": [part.name for part in names]})
        _ask(cluster, first.queue, RequestCode.ABORT_EXTERNAL_TRANSACTION, _fields(first), body)


def _by_broker(parts: Sequence[Part]) -> list[tuple[Part, list[Part]]]:
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.queue.broker_name, []).append(part)
    return [(found[broker][0], found[broker]) for broker in sorted(found)]


def _fields(part: Part) -> dict[str, object]:
    return {"producer": part.transaction.producer, "epoch": part.epoch, "sequence": part.transaction.sequence}


def _begin(cluster: Cluster, queue: MessageQueue, transaction: Transaction) -> int:
    """Return the epoch of the transaction's run at the broker of *queue*."""
    key = master(cluster, queue), transaction.producer, transaction.run
    if key not in _epochs:
        ext = {"producer": transaction.producer, "run": transaction.run}
        answer = _ask(cluster, queue, RequestCode.BEGIN_EXTERNAL_TRANSACTIONS, ext, b"")
        if answer.code != ResponseCode.SUCCESS:
            raise WriteError(_refused("begin of a transaction", queue, answer))
        _epochs[key] = answer.integer("epoch")
    return _epochs[key]


def _ask(cluster: Cluster, queue: MessageQueue, code: int, ext: Mapping[str, object], body: bytes) -> Answer:
    """Ask the broker of *queue* until it answers."""
    limit_s, lost = max(cluster.timeout_s, COMMIT_S), ""
    for _ in attempts(cluster.timeout_s):
        try:
            with CONNECTIONS.lent(master(cluster, queue), cluster.security, limit_s) as connection:
                answer = connection.request(code, ext, body)
        except ConnectionLost as error:
            lost = str(error)
            continue
        if answer.code not in RETRIED:
            return answer
        lost = _refused("request", queue, answer)
    raise WriteError(f"broker {queue.broker_name!r} did not answer for {cluster.timeout_s:g} s: {lost}")


def _refused(what: str, queue: MessageQueue, answer: Answer) -> str:
    name = RESPONSE_NAMES.get(answer.code, str(answer.code))
    return _explained(f"broker {queue.broker_name!r} refused the {what}: {name}: {answer.remark}", answer)


def _explained(text: str, answer: Answer) -> str:
    """Return *text* with what to do."""
    is_off = answer.code == ResponseCode.NO_PERMISSION and "external transactions" in answer.remark
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED or is_off:
        return f"{text}; it offers no external transactions{OTHERS}"
    if answer.code == ResponseCode.ILLEGAL_OPERATION:
        return f"{text}; the query was started again, and only its newest run can write"
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return f"{text}; start the query again, which writes the batch again"
    return text
