"""What one committed transaction costs inside the process: half message and END_TRANSACTION in, answers out, no socket.

    python benchmarks/transactions.py [--rounds 20] [--in-flight 32]
    python benchmarks/transactions.py --many 1000000

Each read has --in-flight half messages of 1 KiB, and before each the oneway request that commits one of the previous
read, as from as many threads of RocketMQ's TransactionProducer, with its fields and its binary headers. The plugin
timer is on as well, as by default. Prints the least and the median of the rounds in microseconds a
transaction, how long a start takes that computes the state of 100,000 half messages from the log, and the longest turn
of the event loop, in its processor time, while a round checks them: the best of three rounds.

With --many: a process sends that many half messages of 100 bytes, commits all but each tenth, and kills itself. Prints
how far the state was behind the log, how long the next start takes, in real and in processor time, how many bytes the
state takes, and rounds of checks over the tenth that is pending, which lies all over the log.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain, zip_longest
from pathlib import Path

import trio
from sends import Sink, new_connection

from martlet.broker import Broker
from martlet.contracts import Producers, Transactions
from martlet.message import encode_properties
from martlet.plugins.loader import load
from martlet.runtime.steps import finish_now
from martlet.state import Projection
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.wire.codec import FrameBuffer, encode_binary_command
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode
from martlet_remoting.wire.packets import Command
from martlet_tx.checks import Checks
from martlet_tx.config import TxConfig
from martlet_tx.plugin import TxPlugin
from martlet_tx.state import HalfMessageState
from martlet_tx.transactions import HeldTransactions

TOPIC, GROUP = "Transactions", "benchmark_transaction_producer"
READS = 30
ROUNDS = 3
HALVES = 100_000
CONFIG = TxConfig(immunity_ms=0, pending_max=10_000_000, check_bytes_max=1 << 40)
COMMIT = 8


class Keeper(Sink):
    """A peer that keeps the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = FrameBuffer()

    def send(self, *pieces: bytes) -> None:
        self.frames.receive_data(b"".join(pieces))


@asynccontextmanager
async def running(folder: str) -> AsyncIterator[Broker]:
    plugin = TxPlugin(CONFIG)
    (Path(folder) / "config").mkdir(exist_ok=True)

    def install(broker: Broker) -> Sequence[Projection]:
        broker.topics.update(TOPIC)
        broker.capabilities |= plugin.martlet_capabilities(broker)
        broker.set_stages([("tx", stage) for stage in plugin.martlet_stages(broker)])
        return plugin.martlet_projections(broker)

    began, used = time.perf_counter(), time.process_time()
    async with serving(Path(folder), store=StoreConfig(flush="async"), projections=install) as served:
        took, used = time.perf_counter() - began, time.process_time() - used
        print(f"start: {took:6.2f} s, {used:6.2f} s of CPU to recover the store and to compute the state")
        timer = load(["timer"], {})
        await timer.call("martlet_capabilities", broker=served.broker)
        found = await timer.call("martlet_stages", broker=served.broker)
        stages = [(name, stage) for name, stages in found for stage in stages]
        served.broker.set_stages([*served.broker.stages.pairs, *stages])
        yield served.broker


def halves(number: int, count: int, size: int = 1024) -> list[bytes]:
    """The sends of *count* half messages."""
    made = []
    for i in range(count):
        key = f"7F00000100002A139B4700{number:06d}{i:04d}".ljust(32, "0")[:32]
        properties = {"TRAN_MSG": "true", "UNIQ_KEY": key, "WAIT": "true", "PGROUP": GROUP}
        ext = {"a": GROUP, "b": TOPIC, "c": "TBW102", "d": 1000, "e": i % 8, "f": 4, "g": 1732000000000, "h": 0}
        ext |= {"i": encode_properties(properties).decode(), "j": 0, "k": "false", "m": "false", "n": "bench"}
        made.append(encode_binary_command(Command(RequestCode.SEND_MESSAGE_V2, ext, b"x" * size, opaque=i)))
    return made


def ends(answers: list[Command]) -> list[bytes]:
    """The END_TRANSACTION of each half message, without an answer, as clients send it."""
    made = []
    for i, answer in enumerate(answers):
        key = answer.ext["transactionId"]
        ext = {"topic": TOPIC, "producerGroup": GROUP, "tranStateTableOffset": answer.ext["queueOffset"]}
        ext |= {
            "commitLogOffset": int(str(answer.ext["msgId"])[-16:], 16),
            "commitOrRollback": COMMIT,
            "bname": "bench",
        }
        ext |= {"fromTransactionCheck": "false", "msgId": key, "transactionId": key}
        made.append(encode_binary_command(Command(RequestCode.END_TRANSACTION, ext, b"", i, FLAG_ONEWAY)))
    return made


async def commits(rounds: int, in_flight: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with running(folder) as broker:
            peer, connection = Keeper(), new_connection()
            handler = RemotingHandler(RemotingState(broker, RemotingConfig()), peer, connection)

            async def take(data: bytes) -> float:
                began = time.process_time()
                connection.receive_data(data, 0.0)
                for command in connection.events():
                    rest = handler.handle(command)
                    if rest is not None:  # after each thousand requests, as the server does
                        await rest
                broker.store.committer.commit()
                return time.process_time() - began

            costs, answers = [], list[Command]()
            for number in range(rounds):
                spent = 0.0
                for read in range(READS):
                    pairs = zip_longest(ends(answers), halves(number * READS + read, in_flight), fillvalue=b"")
                    spent += await take(b"".join(chain.from_iterable(pairs)))
                    answers = list(peer.frames.commands())
                    assert [answer.code for answer in answers] == [0] * in_flight
                costs.append(spent * 1e6 / (READS * in_flight))
                await trio.sleep(0.02)
            await take(b"".join(ends(answers)))
            queues = [broker.store.queue(TOPIC, queue_id) for queue_id in range(8)]
            assert sum(queue.next_offset for queue in queues) == rounds * READS * in_flight
            least, median = min(costs), statistics.median(costs)
            print(f"transaction of 1 KiB, {in_flight} in flight: least {least:6.2f} us, median {median:6.2f} us")


async def rounds_of_checks(broker: Broker, held: HeldTransactions) -> None:
    """Check every pending transaction `ROUNDS` times; print the processor time and the longest turn of the best."""
    asked, best = 0, (9e9, 9e9)

    def check(*arguments: object) -> bool:
        nonlocal asked
        asked += 1
        return True

    broker.capabilities[Producers] = Producers(check)
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await trio.lowlevel.checkpoint()
            longest = max(longest, time.thread_time() - began)

    for _ in range(ROUNDS):
        asked, longest, began = 0, 0.0, time.process_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await Checks(broker, CONFIG, held).round()
            nursery.cancel_scope.cancel()
        best = min(best, (longest, time.process_time() - began))
    longest, spent = best
    print(f"a round of {asked} checks: {spent:6.2f} s of CPU, longest turn {longest * 1000:5.1f} ms of CPU")


def forget(folder: Path) -> None:
    """Remove the snapshots in *folder*."""
    for path in folder.rglob("*.snapshot*"):
        path.unlink()


async def checks() -> None:
    """A round of checks over many pending transactions, and a start that computes them from the log."""
    with tempfile.TemporaryDirectory() as folder:
        async with running(folder) as broker:
            peer, connection = Keeper(), new_connection()
            handler = RemotingHandler(RemotingState(broker, RemotingConfig()), peer, connection)
            for number in range(HALVES // 40):
                connection.receive_data(b"".join(halves(number, 40)), 0.0)
                for command in connection.events():
                    rest = handler.handle(command)
                    if rest is not None:
                        await rest
                broker.store.committer.commit()
                list(peer.frames.commands())
                await trio.lowlevel.checkpoint()
            held = broker.capability(Transactions)
            assert isinstance(held, HeldTransactions)
            await trio.sleep(0.5)
            await rounds_of_checks(broker, held)
        forget(Path(folder))
        async with running(folder):
            pass


async def fill(folder: str, count: int) -> None:
    """Send *count* half messages, commit all but each tenth, and die."""
    async with running(folder) as broker:
        held = broker.capability(Transactions)
        assert isinstance(held, HeldTransactions)
        peer, connection = Keeper(), new_connection()
        handler = RemotingHandler(RemotingState(broker, RemotingConfig()), peer, connection)
        answers: list[Command] = []
        behind = 0
        for number in range(count // 50 + 1):
            kept = [answer for place, answer in enumerate(answers) if place % 10]
            sends = halves(number, 50, 100) if number < count // 50 else []
            connection.receive_data(b"".join([*ends(kept), *sends]), 0.0)
            for command in connection.events():
                rest = handler.handle(command)
                if rest is not None:
                    await rest
            broker.store.committer.commit()
            answers = list(peer.frames.commands())
            await trio.lowlevel.checkpoint()
            behind = max(behind, held.op_queue.next_offset - held.state.ops.next)
        # Wait until a start has no more to do than it would have after any other moment.
        while held.state.halves.pending != count // 10:  # noqa: ASYNC110
            await trio.sleep(0.01)
        print(f"load: at most {behind} op records were not applied yet", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def memory_of(broker: Broker, state: HalfMessageState) -> int:
    """Return the bytes that a copy of *state* takes."""
    data = b"".join(finish_now(state.freeze()))
    copy = HalfMessageState(broker)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    finish_now(copy.restore(data, 0))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert copy.halves.pending == state.halves.pending
    return after - before


async def start_again(folder: str, count: int) -> None:
    async with running(folder) as broker:
        held = broker.capability(Transactions)
        assert isinstance(held, HeldTransactions)
        state = held.state
        assert state.halves.pending == count // 10
        size = memory_of(broker, state)
        print(f"{state.halves.next} half messages, {state.halves.pending} pending: {size / 1024:.0f} KiB of memory")
        await rounds_of_checks(broker, held)
        first = state.ops.first_with(state.halves.first())
        print(f"RocketMQ would read {state.ops.next - first} of {state.ops.next} op records")


def many(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--fill", folder, "--many", str(count)], check=False)
        trio.run(start_again, folder, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--fill", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.fill:
        trio.run(fill, words.fill, words.many)
    elif words.many:
        many(words.many)
    else:
        trio.run(commits, words.rounds, words.in_flight)
        trio.run(checks)


if __name__ == "__main__":
    main()
