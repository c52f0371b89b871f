"""A broker with external transactions whose tasks do not run, what is asked of it, and what is stored in the end."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, final

import pytest
import trio
from tests.state.power_cuts import opened
from tests.stored import records_in
from tests.tx.talk import install_with
from trio.testing import wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.contracts import (
    ExternalCommit,
    ExternalRun,
    ExternalStage,
    ExternalTransaction,
    ExternalTransactions,
    StagedBatch,
)
from martlet.errors import Refused
from martlet.message import Record
from martlet.runtime.clock import Clock
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, ManualClock
from martlet_tx.config import TxConfig
from martlet_tx.external.transactions import StagedTransactions
from martlet_tx.formats import HALF_TOPIC, OP_TOPIC

T = TypeVar("T")

TOPIC: Final = "orders"
OTHER: Final = "bills"
QUERY: Final = "query"
SIZES: Final[dict[str, Any]] = {"segment_bytes": 16384, "page_bytes": 2048, "cache_bytes": 8192}


def nothing(topic: str) -> None:
    """Allow every topic."""


@final
class Sink:
    """A broker with the plugin, and one producer."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.store = broker.store
        found = broker.capability(ExternalTransactions)
        assert isinstance(found, StagedTransactions)
        self.staged = found
        self.state = found.state

    async def do(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do *work* while the store flushes and deliveries go on; return its result."""
        results: list[T] = []
        errors: list[Exception] = []

        async def run() -> None:
            try:
                results.append(await work())
            except Exception as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            self.staged.deliveries.nursery = nursery
            nursery.start_soon(run)
            while nursery.child_tasks:
                await wait_all_tasks_blocked()
                await self.settle()
            self.staged.deliveries.nursery = None
        if errors:
            raise errors[0]
        return results[0]

    async def settle(self) -> None:
        """Make all that was appended durable, readable and applied; accept writes again once the disk has space."""
        with suppress(Refused):
            self.store.committer.commit()
        if self.store.admission.refusal:
            self.store.upkeep.retention.look()
        await self.store.flusher.flush()
        for driven in self.broker.projections._driven:
            await self.broker.projections._catch_up(driven)

    async def begin(self, run: str, producer: str = QUERY, identity: str = "") -> tuple[int, int]:
        begun = await self.do(lambda: self.staged.begin(identity, producer, run))
        return begun.epoch, begun.committed

    async def begin_at(self, run: str, began_ms: int = 0, *brokers: str, producer: str = QUERY) -> ExternalRun:
        return await self.do(lambda: self.staged.begin("", producer, run, began_ms, brokers))

    async def prepare(
        self,
        sequence: int,
        parts: Sequence[tuple[str, int]],
        *,
        epoch: int = 0,
        producer: str = QUERY,
        is_last: bool = False,
        content: str = "",
    ) -> ExternalCommit:
        name = ExternalTransaction(producer, epoch, sequence, content=content)
        return await self.do(lambda: self.staged.prepare(name, parts, nothing, is_last=is_last))

    async def abort_prepared(self, sequence: int, *, epoch: int) -> int:
        return await self.do(lambda: self.staged.abort_prepared(ExternalTransaction(QUERY, epoch, sequence)))

    async def stage(
        self,
        sequence: int,
        part: str,
        bodies: Sequence[str],
        *,
        chunk: int = 0,
        epoch: int = 0,
        topic: str = TOPIC,
        queue_id: int = 0,
        properties: str = "",
        producer: str = QUERY,
        identity: str = "",
        **more: Any,
    ) -> ExternalStage:
        members = [(body.encode(), f"UNIQ_KEY\x01{body}\x02{properties}".encode(), 7) for body in bodies]
        batch = StagedBatch(topic, queue_id, members, 0, 1_700_000_000_000, HOST, **more)
        name = ExternalTransaction(producer, epoch, sequence, identity)
        staged = await self.do(lambda: self.staged.stage(name, part, chunk, batch))
        await self.settle()
        return staged

    async def commit(
        self,
        sequence: int,
        parts: Sequence[tuple[str, int]] | None,
        *,
        epoch: int = 0,
        producer: str = QUERY,
        identity: str = "",
        check: Callable[[str], None] = nothing,
        is_last: bool = False,
        content: str = "",
    ) -> ExternalCommit:
        name = ExternalTransaction(producer, epoch, sequence, identity, content)
        return await self.do(lambda: self.staged.commit(name, parts, check, is_last=is_last))

    async def abort(
        self, sequence: int, parts: Sequence[str] | None = None, *, epoch: int = 0, producer: str = QUERY
    ) -> int:
        name = ExternalTransaction(producer, epoch, sequence)
        return await self.do(lambda: self.staged.abort(name, parts))

    async def decide(self, sequence: int, parts: Sequence[tuple[str, int]], producer: str = QUERY) -> None:
        """Commit a large transaction of which only the first group is delivered, as if the broker stopped then."""
        done = trio.Event()

        async def commit() -> None:
            with pytest.raises(Refused, match="its delivery continues after a restart"):
                await self.staged.commit(ExternalTransaction(producer, 0, sequence), parts, nothing)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit)
            while not done.is_set():
                await wait_all_tasks_blocked()
                await self.settle()

    async def go_on(self) -> None:
        """Finish the deliveries that an earlier run left, as a start does."""
        self.staged.ready()

        async def all_done() -> None:
            assert self.staged.deliveries.nursery is not None
            self.staged.deliveries.start(self.staged.deliveries.nursery)

        await self.do(all_done)

    def records(self, topic: str, queue_id: int = 0) -> Iterator[Record]:
        queue = self.store.queues.find(topic, queue_id)
        return records_in(self.store, queue) if queue is not None else iter(())

    def stored(self, topic: str = TOPIC, queue_id: int = 0) -> list[str]:
        return [record.body.decode() for record in self.records(topic, queue_id)]

    def parts(self) -> Counter[tuple[int, str]]:
        """Return the numbers of chunks by sequence and part of the one producer."""
        return Counter({name: part.chunks for name, part in self.state.parts_of(("", QUERY))})


async def sink(
    disk: FakeDisk | None = None,
    clock: Clock | None = None,
    flush: str = "sync",
    config: TxConfig | None = None,
    **sizes: Any,
) -> Sink:
    """Open a broker with two topics of one queue each."""
    found = await opened(
        disk or FakeDisk(),
        clock or ManualClock(),
        flush,
        *(TOPIC, OTHER, HALF_TOPIC, OP_TOPIC),
        install=install_with(config or TxConfig()),
        **{**SIZES, **sizes},
    )
    made = Sink(found)
    made.staged.ready()
    return made


def hurt(disk: FakeDisk, damage: str) -> None:
    """Remove or zero the snapshots."""
    for path in [path for path in disk.files if ".snapshot" in path and damage]:
        if damage == "removed":
            disk.files.pop(path)
            disk.stable_files.pop(path, None)
        else:
            disk.files[path].data[:] = bytes(len(disk.files[path].data))


def numbered(first: int, count: int, prefix: str = "m") -> list[str]:
    return [f"{prefix}{number:04d}" for number in range(first, first + count)]
