"""The runs of a producer of external transactions, and the requests to brokers about them.

Before a run stages anything, it begins at all brokers that the producer may write to, and each broker remembers the
names of all. So a run finds every broker at which an older run may have committed, even if the topic has left it. If
the first brokers do not know the producer, the run asks all brokers of the cluster. Once the run has begun at them, no
older run can decide a transaction. A transaction that is committed on one broker is decided: the run commits its
prepared parts on the others, and drops prepared parts of undecided transactions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from martlet_remoting.wire.codes import RESPONSE_NAMES, RequestCode, ResponseCode
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import BUSY, Cluster, rights_hint
from martlet_spark.connection import CONNECTIONS, AnswerFrame, ConnectionBroken, attempts
from martlet_spark.errors import WriteError
from martlet_spark.write.writable import TEMPLATE_TOPIC, master

__all__ = ["NO_RUN", "Transaction", "WriterRun", "ask", "begin", "explained", "refused"]

# A commit of many messages takes long, and the broker answers once all of them are readable.
COMMIT_S: Final = 60.0
OTHERS: Final = "; set the option guarantee to at-least-once, with which rows may be written twice"
MISSED: Final = (
    "the query may have written to it, and does not continue without knowing what; start it, or if it is gone for good "
    "with its messages, name it in the option retiredBrokers"
)
# Runs that a worker remembers, so that it begins each run once.
RUNS_MAX: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Transaction:
    """The rows that *producer* commits as *sequence*; its older runs are fenced, unless *run* is empty.

    *began_ms* is the begin of the run, by which brokers recognise a run older than the newest one; 0 for none. Brokers
    forget the producer soon after a transaction with *is_last*. *named* says that the user has chosen name and number.
    """

    producer: str
    sequence: int
    run: str = ""
    began_ms: int = 0
    is_last: bool = False
    named: bool = False

    def __str__(self) -> str:
        if self.named:
            return f"txnVersion {self.sequence} of txnAppId {self.producer!r}"
        return f"batch {self.sequence} of query {self.producer!r}"

    @property
    def anew(self) -> str:
        """A hint for the case that another query has written under the same name."""
        return "choose another txnAppId" if self.named else "begin with a new checkpoint"

    def fields(self, epoch: int, content: str = "") -> dict[str, object]:
        """Return the header fields of a request about the transaction; brokers keep the *content* of a commit."""
        found: dict[str, object] = {"producer": self.producer, "epoch": epoch, "sequence": self.sequence}
        if content:
            found["content"] = content
        return {**found, "last": "true"} if self.is_last else found


@final
@dataclass(frozen=True, slots=True)
class WriterRun:
    """A run that has begun at brokers, with its epoch at each.

    Attributes:
      brokers: all brokers to which the producer may write, also retired ones; each of them knows all.
      committed: the last sequence that any of them had committed when the run began, -1 if none.
      content: the digest of that sequence's rows; empty if it was committed without one.
    """

    epochs: Mapping[str, int] = field(default_factory=dict)
    brokers: frozenset[str] = frozenset()
    committed: int = -1
    content: str = ""


NO_RUN: Final = WriterRun()
_runs: dict[tuple[frozenset[str], str, str], WriterRun] = {}


def begin(
    cluster: Cluster, transaction: Transaction, topic: str, brokers: frozenset[str], retired: frozenset[str]
) -> WriterRun:
    """Begin the run of *transaction* at all brokers of the producer, end older transactions, and return the run.

    *topic* is one that the run writes to: brokers require the permission to publish to it.

    Raises:
      WriteError: a broker refuses, or does not answer in time.
    """
    key = cluster.endpoints, transaction.producer, transaction.run
    run = _runs.get(key, NO_RUN)
    if brokers <= run.brokers:
        return run
    begun = _Beginning(cluster, transaction, topic, run, retired)
    begun.begin_at(brokers)
    if run is NO_RUN and begun.is_unknown:
        begun.begin_at(_others(cluster, transaction, topic, frozenset(begun.epochs) | retired))
    begun.end_left()
    while len(_runs) >= RUNS_MAX:
        del _runs[next(iter(_runs))]
    _runs[key] = WriterRun(begun.epochs, begun.names, begun.committed, begun.content)
    return _runs[key]


@final
class _Beginning:
    """The answers of brokers to the begin of a run."""

    def __init__(
        self, cluster: Cluster, transaction: Transaction, topic: str, run: WriterRun, retired: frozenset[str]
    ) -> None:
        self._cluster = cluster
        self._transaction = transaction
        self._topic = topic
        self._retired = retired
        self._known: dict[str, frozenset[str]] = {}
        self._left: dict[str, int] = {}
        self.epochs = dict(run.epochs)
        self.names = run.brokers
        self.committed = run.committed
        self.content = run.content

    @property
    def is_unknown(self) -> bool:
        """Whether no run of the producer has begun at these brokers before."""
        return all(epoch == 1 for epoch in self.epochs.values())

    def begin_at(self, brokers: frozenset[str]) -> None:
        """Begin at *brokers* and at all brokers that they know, until each broker knows all."""
        self.names |= brokers
        while brokers_behind := [each for each in self.names - self._retired if not self.names <= self._known_by(each)]:
            for broker in sorted(brokers_behind):
                answer = _begin(self._cluster, self._transaction, self._topic, broker, self.names)
                if answer.code != ResponseCode.SUCCESS:
                    raise WriteError(refused("begin of a transaction", _any_queue(broker), answer))
                self.epochs[broker] = answer.integer("epoch")
                self._note_committed(answer.integer("committed"), answer.ext.get("content", ""))
                self._left[broker] = answer.integer("prepared")
                self._known[broker] = frozenset(filter(None, answer.ext.get("brokers", "").split(",")))
                self.names |= self._known[broker]

    def _note_committed(self, sequence: int, content: str) -> None:
        if sequence > self.committed:
            self.committed, self.content = sequence, content
        elif sequence == self.committed:
            self.content = self.content or content

    def _known_by(self, broker: str) -> frozenset[str]:
        return self._known.get(broker, frozenset())

    def end_left(self) -> None:
        """End the prepared transactions of older runs: commit decided ones, and drop the others."""
        for broker, sequence in self._left.items():
            if sequence >= 0:
                is_decided = sequence <= self.committed
                _end(self._cluster, self._transaction, broker, self.epochs[broker], sequence, is_decided=is_decided)


def _others(cluster: Cluster, transaction: Transaction, topic: str, asked_brokers: frozenset[str]) -> frozenset[str]:
    """Return the other brokers that know the producer: its topic may have left all brokers that had it."""
    brokers: list[str] = []
    for broker in cluster.masters().keys() - asked_brokers:
        try:
            answer = _begin(cluster, transaction, topic, broker, None)
        except WriteError:
            if transaction.sequence:
                raise
            continue  # most likely the query is new
        if answer.code == ResponseCode.ILLEGAL_OPERATION:
            raise WriteError(refused("begin of a transaction", _any_queue(broker), answer))
        if answer.code == ResponseCode.SUCCESS and answer.integer("epoch"):
            brokers.append(broker)
    return frozenset(brokers)


def _begin(
    cluster: Cluster, transaction: Transaction, topic: str, broker: str, names: frozenset[str] | None
) -> AnswerFrame:
    """Begin at *broker* and tell it *names*; without names, begin only if the broker knows the producer."""
    ext: dict[str, object] = {"producer": transaction.producer, "run": transaction.run, "topic": topic}
    ext["began"] = transaction.began_ms
    ext |= {"known": "true"} if names is None else {"brokers": ",".join(sorted(names))}
    return ask(cluster, _any_queue(broker), RequestCode.BEGIN_EXTERNAL_TRANSACTIONS, ext, b"", MISSED)


def _end(
    cluster: Cluster, transaction: Transaction, broker: str, epoch: int, sequence: int, *, is_decided: bool
) -> None:
    ext = {"producer": transaction.producer, "epoch": epoch, "sequence": sequence, "prepared": "true"}
    commit, abort = RequestCode.COMMIT_EXTERNAL_TRANSACTION, RequestCode.ABORT_EXTERNAL_TRANSACTION
    answer = ask(cluster, _any_queue(broker), commit if is_decided else abort, ext, b"", MISSED)
    if answer.code != ResponseCode.SUCCESS:
        raise WriteError(
            refused(f"end of batch {sequence}, which an older run had prepared", _any_queue(broker), answer)
        )


def _any_queue(broker: str) -> MessageQueue:
    return MessageQueue(TEMPLATE_TOPIC, broker, 0)


def ask(
    cluster: Cluster, queue: MessageQueue, code: int, ext: Mapping[str, object], body: bytes, hint: str = ""
) -> AnswerFrame:
    """Ask the broker of *queue* until it answers; *hint* is for the error if it does not."""
    limit_s, lost = max(cluster.timeout_s, COMMIT_S), ""
    for _ in attempts(cluster.timeout_s):
        try:
            with CONNECTIONS.lent(master(cluster, queue), cluster.security, limit_s) as connection:
                answer = connection.request(code, ext, body)
        except ConnectionBroken as error:
            lost = str(error)
            continue
        if answer.code not in BUSY:
            return answer
        lost = refused("request", queue, answer)
    hint = f"; {hint}" if hint else ""
    raise WriteError(f"broker {queue.broker_name!r} did not answer for {cluster.timeout_s:g} s: {lost}{hint}")


def refused(what: str, queue: MessageQueue, answer: AnswerFrame) -> str:
    """Return the text of an error for a broker that refused *what*."""
    name = RESPONSE_NAMES.get(answer.code, str(answer.code))
    return explained(f"broker {queue.broker_name!r} refused the {what}: {name}: {answer.remark}", answer)


def explained(text: str, answer: AnswerFrame) -> str:
    """Return *text* with a hint."""
    is_off = answer.code == ResponseCode.NO_PERMISSION and "external transactions" in answer.remark
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED or is_off:
        return f"{text}; it offers no external transactions{OTHERS}"
    if answer.code == ResponseCode.ILLEGAL_OPERATION:
        return f"{text}; the query was started again, and only its newest run can write"
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return f"{text}; start the query again, which writes the batch again"
    hint = rights_hint(answer)
    return text if hint in text else text + hint
