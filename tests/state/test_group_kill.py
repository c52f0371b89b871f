"""A real process, killed while a shared group works: no message comes again whose acknowledgement was durable."""

import random
import sys
from pathlib import Path

import pytest
import trio
from tests.kills import ROUNDS, Victim
from tests.state.group_talk import drain, handles, join

from martlet.message import Message
from martlet.runtime.clock import SystemClock
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet.testing.stores import small_config

SIZES = {"segment_bytes": 1 << 20, "page_bytes": 1 << 16, "cache_bytes": 1 << 20}


def config(flush: str) -> StoreConfig:
    return small_config(flush=flush, **SIZES)


async def work(directory: Path, flush: str) -> None:
    """Publish, lease and acknowledge for ever; print the offsets whose acknowledgements are durable."""
    chance = random.Random()
    async with serving(directory, store=config(flush), clock=SystemClock()) as running:
        broker = running.broker
        broker.topics.ensure("t", 1)
        member = join(broker, credit=100_000, lease_s=3600)
        held: dict[int, int] = {}
        while True:
            for _ in range(20):
                broker.publish(Message("t", b"x", queue_id=0))
            broker.store.committer.commit()
            await broker.store.flusher.wait_flushed(broker.store.appended)
            held |= handles((await drain(member))[1])
            settled = chance.sample(sorted(held), min(15, len(held)))
            for offset in settled:
                assert member.group.ack(0, offset, held.pop(offset))
            for offset in chance.sample(sorted(held), min(3, len(held))):
                assert member.group.nack(0, offset, held.pop(offset), 3600)
            broker.store.committer.commit()
            await broker.store.flusher.wait_flushed(broker.store.appended)
            await trio.lowlevel.checkpoint()
            print(*settled, flush=True)


async def check(directory: Path, flush: str, settled: set[int]) -> int:
    """Return how many messages come again; all were in doubt, and none of *settled* is among them."""
    clock = SystemClock()
    later = type("Later", (), {"now_ms": lambda self: clock.now_ms() + 7_200_000})()
    async with serving(directory, store=config(flush), clock=later) as running:
        broker = running.broker
        member = join(broker, credit=1_000_000, lease_s=0.001)
        came = {offset for delivery in (await drain(member))[1] for offset in delivery.offsets}
        assert not came & settled
        published = broker.store.queue("t", 0).next_offset
        in_doubt = set(range(published)) - came - settled
        assert len(in_doubt) <= 15  # acknowledged, and killed before that was told
        return len(came)


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_a_shared_group_survives_kill_9(tmp_path: Path, flush: str) -> None:
    chance = random.Random(flush)
    for number in range(ROUNDS):
        directory = tmp_path / str(number)
        with Victim("tests.state.test_group_kill", directory, flush) as victim:
            lines = [victim.line() for _ in range(chance.randrange(5, 60))] + victim.kill()
        settled = {int(offset) for line in lines for offset in line.split()}
        assert settled
        assert trio.run(check, directory, flush, settled) > 0


if __name__ == "__main__":
    trio.run(work, Path(sys.argv[1]), sys.argv[2])
