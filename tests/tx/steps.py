"""Steps of transactions on a broker that may be cut off at any of them, and what must hold afterwards."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from tests.state.power_cuts import Workload
from tests.tx.talk import TOPIC, Sellers, flushing, sellers

from martlet.contracts import HalfMessage
from martlet.errors import Refused
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock
from martlet_tx.config import TxConfig
from martlet_tx.formats import HALF_TOPIC, PARK_TOPIC

SIZES: Final[dict[str, Any]] = {"segment_bytes": 8192, "page_bytes": 512, "cache_bytes": 8192}
CONFIG: Final = TxConfig(immunity_ms=6000, checks_max=2)
Choice = Callable[[list[HalfMessage]], HalfMessage]
STEPS: Final = ("prepare", "commit", "rollback", "together", "check", "resume", "roll", "write", "flush", "save")


class Work(Workload):
    """Does the steps *names*, and remembers for each key what was asked for and what of it is durable.

    *choose* picks one of several transactions.
    """

    def __init__(
        self, disk: FakeDisk, flush: str, names: Sequence[str], choose: Choice, *, closes: bool = True
    ) -> None:
        super().__init__(disk, flush)
        self.names = names
        self.choose = choose
        self.closes = closes
        self.clock = ManualClock()
        self.sent = 0
        self.durable_sent = 0
        # The key and how its transaction ended: "commit", "rollback".
        self.ended: dict[str, str] = {}
        self.durable_ended: dict[str, str] = {}
        self.asked: Counter[str] = Counter()
        self.found: Sellers | None = None

    def shared(self) -> Iterable[object]:
        return self.disk, self.found, self.choose

    async def work(self) -> None:
        """Open a broker, do the steps, and stop in order."""
        self.found = await sellers(self.disk, self.clock, self.flush, CONFIG, **SIZES)
        for name in self.names:
            await self.step(name)
        if self.closes:
            self.found.broker.projections.save()
            await self.found.store.close()

    async def step(self, name: str) -> None:
        found = self.found
        assert found is not None
        if name == "prepare":
            found.prepare(f"k{self.sent}")
            self.sent += 1
        elif name in ("commit", "rollback"):
            halves = await self.halves(HALF_TOPIC)
            if halves:
                self.end(self.choose(halves), name)
        elif name == "together":
            self.end_together(await self.halves(HALF_TOPIC))
        elif name == "check":
            self.clock.ms += 30_000
            await flushing(found, found.checks.round)
            self.asked.update(found.asked.keys())
        elif name == "resume":
            halves = await self.halves(PARK_TOPIC) + await self.halves(HALF_TOPIC)
            if halves:
                with suppress(Refused):
                    found.held.resume(self.choose(halves))
        elif name == "roll":
            await found.broker.turns.finish(found.state.roll(0, found.store.appended))
        else:
            await self.store(name)

    async def store(self, name: str) -> None:
        found = self.found
        assert found is not None
        found.store.committer.commit()
        if name in ("flush", "save"):
            sent, ended = self.sent, dict(self.ended)
            await found.settle()
            self.durable_sent, self.durable_ended = sent, ended
        if name == "save":
            for driven in found.broker.projections._driven:
                await found.broker.projections.snapshots.write(driven)

    async def halves(self, topic: str) -> list[HalfMessage]:
        """Return every readable half message in *topic*, whether its transaction has ended or not."""
        found = self.found
        assert found is not None
        return [await found.held.find(record.position) for record in found.records(topic)]

    def end(self, half: HalfMessage, how: str) -> None:
        found = self.found
        assert found is not None
        key = half.record.property("UNIQ_KEY")
        with suppress(Refused):
            found.held.end(half, commit=how == "commit")
            assert key not in self.ended, f"transaction {key} ended twice"
            self.ended[key] = how

    def end_together(self, halves: list[HalfMessage]) -> None:
        """Commit and roll back, by turns, all transactions that have not ended."""
        found = self.found
        assert found is not None
        ends = [(half, number % 2 == 0) for number, half in enumerate(halves)]
        left = found.held.end_together(ends)
        for place, (half, commit) in enumerate(ends):
            if place not in left:
                key = half.record.property("UNIQ_KEY")
                assert key not in self.ended, f"transaction {key} ended twice"
                self.ended[key] = "commit" if commit else "rollback"

    # ---- what must hold after a crash

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        """Check each transaction after a restart, and that each can still be brought to its one end."""
        found = await sellers(disk, ManualClock(self.clock.ms), self.flush, CONFIG, **SIZES)
        pending = Counter(
            each.half.record.property("UNIQ_KEY") for each in await found.held.pending(0, 10_000, 1 << 30)
        )
        parked = self.still_parked(found)
        stored = Counter(found.stored(TOPIC))
        assert max([0, *pending.values(), *stored.values()]) <= 1
        for number in range(self.sent):
            key = f"k{number}"
            places = pending[key] + stored[key] + parked[key]
            self.check_one(key, number, pending[key], stored[key], places)
        await self.check_counts(found)
        await self.finish(found, stored)
        found.store.crash()

    def check_one(self, key: str, number: int, pending: int, stored: int, places: int) -> None:
        ended, durable = self.ended.get(key), self.durable_ended.get(key)
        assert places <= 1, f"{key} is in {places} places"
        if stored:
            assert ended == "commit", f"{key} is stored and ended with {ended}"
        if durable == "commit":
            assert stored, f"{key} was committed and is lost"
        elif durable == "rollback":
            assert not places, f"{key} was rolled back and is still there"
        elif number < self.durable_sent and ended != "rollback":
            assert places == 1, f"{key} is lost"

    def still_parked(self, found: Sellers) -> Counter[str]:
        resumed = found.state.resumed
        return Counter(
            record.property("UNIQ_KEY") for record in found.records(PARK_TOPIC) if record.queue_offset not in resumed
        )

    async def check_counts(self, found: Sellers) -> None:
        """No producer was asked more often than is known; resuming begins again."""
        for each in await found.held.pending(0, 10_000, 1 << 30):
            assert each.checks <= CONFIG.checks_max

    async def finish(self, found: Sellers, stored: Counter[str]) -> None:
        """Commit all that are pending, twice."""
        expected = Counter(stored)
        for _ in range(2):
            for each in await found.held.pending(0, 10_000, 1 << 30):
                key = each.half.record.property("UNIQ_KEY")
                found.held.end(each.half, commit=True)
                expected[key] += 1
            await found.settle()
        assert not found.pending()
        assert Counter(found.stored(TOPIC)) == +expected
        assert max([0, *expected.values()]) <= 1
