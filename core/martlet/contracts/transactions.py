"""The capabilities of transactional messages and of external transactions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from msgspec import Struct

from martlet.message import Record
from martlet.records.layout import Buffer
from martlet.runtime.steps import Steps

__all__ = [
    "ExternalCommit",
    "ExternalProducer",
    "ExternalRun",
    "ExternalStage",
    "ExternalTransaction",
    "ExternalTransactions",
    "HalfMessage",
    "PendingTransaction",
    "Producers",
    "StagedBatch",
    "Transactions",
]


class HalfMessage(Struct, frozen=True, eq=False):
    """A message whose transaction has not ended, so that nobody receives it.

    Attributes:
      record: the stored half message.
      topic: the topic that its producer sent it to; ``queue_id`` is the queue.
      group: the group of its producer.
    """

    record: Record
    topic: str
    queue_id: int
    group: str


class PendingTransaction(Struct, frozen=True, eq=False):
    """A half message, and the number of times that producers were asked about it."""

    half: HalfMessage
    checks: int


class Transactions(ABC):
    """A capability: half messages are held until their transaction ends. Offer one with the stage that holds them.

    Protocols end transactions through `Gate.transactions.end`.
    """

    @abstractmethod
    def find_nowait(self, offset: int, position: int) -> HalfMessage | None:
        """Return the half message at *offset* of its queue and *position* of the log; None if `find` must search."""

    @abstractmethod
    async def find(self, position: int) -> HalfMessage:
        """Return the half message at *position* of the log, or the half message that was parked there.

        Raises:
          Refused: no half message is there (Reason.NOT_FOUND).
        """

    @abstractmethod
    async def find_copy(self, position: int, key: str) -> HalfMessage | None:
        """Return the pending half message that replaced the one at *position*, whose unique key is *key*; None if
        none.

        Retention replaces half messages whose segments it removes; their producers still name the original. Waits until
        a copy that was just made is readable.

        Raises:
          NotReady: the key index is being rebuilt.
          StoreFailed: the disk failed.
        """

    @abstractmethod
    def is_late(self, half: HalfMessage) -> bool:
        """Return whether the immunity that the message asked for is over: now only the answer to a check counts."""

    @abstractmethod
    def end(self, half: HalfMessage, *, commit: bool) -> int:
        """Commit the transaction of *half*, or roll it back; return the log position for `Peer.hold_until`.

        Raises:
          Refused: the transaction has ended (Reason.NOT_FOUND), or the message cannot be stored in its topic.
        """

    @abstractmethod
    def end_together(self, ends: Sequence[tuple[HalfMessage, bool]]) -> list[int]:
        """End several transactions, at much less cost than `end` for each; the flag of each tells whether to commit.

        Returns the indexes of the transactions left for `end`, which may refuse them.
        """

    @abstractmethod
    def resume(self, half: HalfMessage) -> int:
        """Check the transaction of *half*, pending or parked, again from the first time; return as `end` does.

        Raises:
          Refused: the transaction has ended (Reason.NOT_FOUND), or there are too many pending ones (Reason.BUSY).
        """

    @abstractmethod
    async def pending(self, offset: int, count: int, bytes_max: int) -> list[PendingTransaction]:
        """Return up to *count* pending transactions in order, from half message *offset* on."""


class StagedBatch(Struct, frozen=True, eq=False):
    """Messages for one queue of *topic*; queue -1 lets the broker choose it. Members are body, properties and flag."""

    topic: str
    queue_id: int
    members: Sequence[tuple[Buffer, bytes, int]]
    sys_flag: int = 0
    born_ms: int = 0
    born_host: bytes = bytes(8)
    reconsume_times: int = 0


class ExternalTransaction(Struct, frozen=True):
    """The name of an external transaction.

    Attributes:
      producer: the name of the writer, such as that of a Spark query.
      epoch: the epoch of the producer's run, from `ExternalTransactions.begin`; 0 if it never began one.
      sequence: the number of the transaction; each commit raises it.
      identity: the writer's identity; a gate sets it, so that nobody can touch the transactions of another identity.
      content: a text by the writer that describes the committed data, such as a digest; kept with the last commit.
    """

    producer: str
    epoch: int
    sequence: int
    identity: str = ""
    content: str = ""


class ExternalRun(Struct, frozen=True):
    """A run of a producer.

    Attributes:
      epoch: the number of the run at this broker, from 1 on.
      committed: the last committed sequence, -1 if none.
      prepared: the sequence that an older run has prepared and not committed, -1 if none.
      brokers: the names of all brokers that runs of the producer have named.
      content: the content of the last committed transaction, from its commit.
    """

    epoch: int
    committed: int
    prepared: int = -1
    brokers: tuple[str, ...] = ()
    content: str = ""


class ExternalStage(Struct, frozen=True):
    """The staged messages of a part; its ``chunks`` are certain only once the log position ``end`` is durable.

    If the sequence ``is_committed`` already, nothing was stored.
    """

    end: int
    chunks: int
    is_committed: bool


class ExternalCommit(Struct, frozen=True):
    """The last committed sequence, and the number of messages delivered by this commit: 0 if it ``is_duplicate``."""

    sequence: int
    messages: int
    is_duplicate: bool


class ExternalProducer(Struct, frozen=True):
    """A producer of external transactions, for lists.

    ``delivering`` and ``prepared`` are sequences, -1 for none. If it ``is_ended``, it is forgotten soon after its last
    commit; ``unused_hours`` count hours of the broker's operation since the producer was used.
    """

    identity: str
    name: str
    epoch: int
    run: str
    committed: int
    delivering: int
    parts: int
    messages: int
    bytes: int
    prepared: int = -1
    is_ended: bool = False
    unused_hours: int = 0


class ExternalTransactions(ABC):
    """A capability: transactions that an outside system coordinates, atomic over topics and queues of one broker.

    Messages are staged in parts, which nobody receives, and a commit delivers all messages of some parts once. Parts
    consist of chunks, which are numbered from 0 on. Protocols use this capability through their gate, which sets the
    identity (`Gate.external.stage`).
    """

    @abstractmethod
    async def begin(
        self,
        identity: str,
        producer: str,
        run: str,
        began_ms: int = 0,
        brokers: Sequence[str] = (),
        *,
        only_known: bool = False,
    ) -> ExternalRun:
        """Begin a run of *producer*, or find it; earlier runs can no longer stage, prepare and commit.

        Args:
          began_ms: when the run began, by the clock of its client; a run that began before the newest run is refused.
            0 if that is unknown: then the run that asks last counts as the newest.
          brokers: the names of brokers that the producer may write to; all that were ever named are remembered.
          only_known: begin nothing if the producer is unknown here; the epoch is then 0.

        Raises:
          Refused: a newer run took over (Reason.FENCED), or there are too many producers (Reason.BUSY).
        """

    @abstractmethod
    async def stage(self, transaction: ExternalTransaction, part: str, chunk: int, batch: StagedBatch) -> ExternalStage:
        """Stage *batch* as chunk number *chunk* of *part*; a chunk that is staged already changes nothing.

        Raises:
          Refused: a newer run took over (Reason.FENCED), a chunk before this one or the run is unknown
            (Reason.NOT_FOUND), a limit is reached, or a message cannot be stored in its topic.
        """

    @abstractmethod
    async def prepare(
        self,
        transaction: ExternalTransaction,
        parts: Sequence[tuple[str, int]],
        check: Callable[[str], object],
        *,
        is_last: bool = False,
    ) -> ExternalCommit:
        """Check that *parts* could be committed, and keep them for the commit, also when a newer run begins.

        For a transaction on several brokers: prepare it on all brokers but one, commit it on that one, which decides
        the transaction, and then on the others.

        Raises:
          Refused: as in `commit`.
        """

    @abstractmethod
    async def commit(
        self,
        transaction: ExternalTransaction,
        parts: Sequence[tuple[str, int]] | None,
        check: Callable[[str], object],
        *,
        is_last: bool = False,
    ) -> ExternalCommit:
        """Deliver *parts*, names with their numbers of chunks, in this order; return when all messages are readable.

        A sequence that is committed already changes nothing.

        Args:
          parts: None for the parts that an older run has prepared as this sequence; changes nothing if there are none.
          check: called with each topic just before the decision; may raise `Refused`.
          is_last: the producer commits nothing more, and is forgotten soon.

        Raises:
          Refused: a newer run took over (Reason.FENCED), a part is incomplete or unknown (Reason.NOT_FOUND), or a topic
            is gone (Reason.NO_TOPIC); nothing is committed.
        """

    @abstractmethod
    async def abort(self, transaction: ExternalTransaction, parts: Sequence[str] | None = None) -> int:
        """Drop *parts* of a transaction, or all its parts, unless it is committed or prepared; return the number
        dropped.
        """

    @abstractmethod
    async def abort_prepared(self, transaction: ExternalTransaction) -> int:
        """Drop the parts that an older run has prepared as this sequence; return their number."""

    @abstractmethod
    def producers(self, after: tuple[str, str], count: int) -> Steps[list[ExternalProducer]]:
        """Return up to *count* producers after the identity and name *after*, ordered by identity and name."""


class Producers(Struct, frozen=True):
    """A capability: asks connected producers about their transactions. Offer one with the protocol that they speak.

    Attributes:
      check_transaction: called with (group, stored half message, topic and queue id that its producer sent it to); asks
        one live producer of the group, each in turn, whether it committed the transaction. Returns False when no
        producer is connected. The answer is a later request of the producer, which may never come.
    """

    check_transaction: Callable[[str, Record, str, int], bool]
