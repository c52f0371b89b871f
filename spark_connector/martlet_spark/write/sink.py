"""The writers that Spark calls: `write` runs in tasks, everything else on the driver."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, final
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from martlet_spark.cluster import Cluster
from martlet_spark.errors import OptionError, SparkConnectorError, WriteError
from martlet_spark.options import AT_LEAST_ONCE, IDEMPOTENT, Options
from martlet_spark.write import staging
from martlet_spark.write.columns import check_columns
from martlet_spark.write.content import NO_CONTENT, Content
from martlet_spark.write.sending import Outbox
from martlet_spark.write.staging import RepeatedTransaction, Staging, TaskPart, Transaction
from martlet_spark.write.targets import QueueTurns, Targets
from martlet_spark.write.writable import WritableQueues, write_queues

__all__ = ["BatchWriter", "StreamWriter", "WrittenTask"]

log = logging.getLogger("martlet.spark")

# Local properties of tasks, in which Spark names their query and batch.
QUERY: Final = "sql.streaming.queryId"
BATCH: Final = "streaming.sql.batchId"
RUN: Final = "spark.jobGroup.id"


@final
@dataclass(frozen=True, slots=True)
class WrittenTask(WriterCommitMessage):
    """The message of a task to the driver: its staged parts, or the *repeated* transaction of an older run."""

    parts: tuple[TaskPart, ...] = ()
    content: Content = NO_CONTENT
    repeated: RepeatedTransaction | None = None


class SinkWriter:
    """The base of batch and streaming writers; pickled for the tasks, so it holds plain data.

    Raises:
      OptionError: the columns cannot be written.
      WriteError, UnknownTopic: the topic cannot be written.
    """

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        self.options = options
        if overwrite:
            text = "a topic cannot be overwritten; use mode append, and in streams output mode append"
            raise OptionError(f"{text}; for results that change, write within foreachBatch")
        check_columns({field.name: field.dataType.simpleString() for field in schema.fields}, options["topic"])
        if options["topic"]:
            write_queues(self.cluster(), options["topic"])

    def cluster(self) -> Cluster:
        return Cluster(self.options["endpoints"], self.options.security, self.options["timeoutMs"] / 1000)

    @property
    def retired(self) -> frozenset[str]:
        return frozenset(self.options["retiredBrokers"])

    def write_rows(
        self, batches: Iterator[Any], transaction: Callable[[], Transaction], *, in_task: bool
    ) -> WrittenTask:
        """Write the rows of one task with the guarantee; return once brokers have confirmed them.

        With *in_task*, the task commits its staged parts; otherwise the driver does.
        """
        cluster = self.cluster()
        queues_of = WritableQueues(cluster)
        turns = QueueTurns(queues_of)
        if self.options["guarantee"] == AT_LEAST_ONCE:
            with closing(Outbox(cluster, turns)) as outbox:
                self._write(batches, queues_of, outbox)
                outbox.finish()
            return WrittenTask()
        with closing(Staging(cluster, turns, transaction(), self.retired)) as stage:
            self._write(batches, queues_of, stage)
            written = WrittenTask(tuple(stage.finish()), stage.content, stage.repeated)
        if in_task:
            self.commit_parts([written])
            return WrittenTask()
        return written

    def _write(self, batches: Iterator[Any], queues_of: WritableQueues, sender: Outbox | Staging) -> None:
        options = self.options
        in_transaction = options["guarantee"] != AT_LEAST_ONCE
        targets = Targets(queues_of, options["topic"], options["batchBytes"], allows_empty=in_transaction)
        for rows in batches:
            for chunk in targets.chunks(rows):
                sender.write(chunk)

    def commit_parts(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit the parts that tasks have staged.

        Raises:
          WriteError: a broker refuses the commit, or the rows differ from those that an older run has committed as the
            same batch.
        """
        written = [message for message in messages if isinstance(message, WrittenTask)]
        content = sum((each.content for each in written), start=NO_CONTENT)
        repeated = next((each.repeated for each in written if each.repeated is not None), None)
        if repeated is not None:
            repeated.check(content, may_change=self.options["changingRows"])
            return
        staging.commit(self.cluster(), _parts(written), self.retired, content)

    def abort_parts(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop staged parts unless they were committed: Spark aborts after a commit whose answer was lost too."""
        try:
            staging.abort(self.cluster(), _parts(messages))
        except SparkConnectorError as error:
            log.warning("%s; brokers drop what was staged later", error)


def _parts(messages: Sequence[WriterCommitMessage | None]) -> list[TaskPart]:
    """Return the parts of *messages*, which are None for tasks that failed."""
    return [part for message in messages if isinstance(message, WrittenTask) for part in message.parts]


@final
class BatchWriter(SinkWriter, DataSourceArrowWriter):
    """Writes the rows of a batch query: Spark commits and aborts with a copy of it.

    The batch is a transaction with a name of its own, or with the user's name and number. The driver commits for
    ``idempotent`` too: otherwise the brokers would remember a name per task for long.
    """

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        unique = f"spark-batch-{uuid4().hex}"
        if options["txnAppId"]:
            began_ms, producer, sequence = time.time_ns() // 1_000_000, options["txnAppId"], options["txnVersion"]
            self._transaction = Transaction(producer, sequence, run=unique, began_ms=began_ms, named=True)
        else:
            self._transaction = Transaction(producer=unique, sequence=0, is_last=True)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self.write_rows(iterator, lambda: self._transaction, in_task=False)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.commit_parts(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.abort_parts(messages)


@final
class StreamWriter(SinkWriter, DataSourceStreamArrowWriter):
    """Writes the rows of a streaming query. Spark makes one writer for each micro-batch, and one more to commit it.

    Runs are ordered by the time at which the driver made the writer of their first batch. So a task of an older run,
    which may linger for hours in a lost executor, cannot fence a newer run at a broker that it reaches first.
    """

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        if options["txnAppId"]:
            text = "options txnAppId and txnVersion are for batches, as within foreachBatch"
            raise OptionError(
                f"{text}; a stream has the id of its query and the numbers of its batches, leave them out"
            )
        self._made_ms = time.time_ns() // 1_000_000

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self.write_rows(iterator, self._transaction, in_task=self.options["guarantee"] == IDEMPOTENT)

    def _transaction(self) -> Transaction:
        task = TaskContext.get()
        assert task is not None, "runs in a task"
        query, batch, run = (task.getLocalProperty(name) for name in (QUERY, BATCH, RUN))
        if query is None or batch is None or run is None:
            raise WriteError(f"this Spark does not say which query runs; set the option guarantee to {AT_LEAST_ONCE}")
        if self.options["guarantee"] == IDEMPOTENT:
            # Each attempt is a run: it ends the transactions of the previous attempt, and only one attempt at a time
            # can write.
            return Transaction(f"{query}/{task.partitionId()}", int(batch), uuid4().hex[:16])
        return Transaction(query, int(batch), run, self._made_ms)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.commit_parts(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.abort_parts(messages)
