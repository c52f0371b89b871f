"""What one committed transaction costs inside the process: half message and END_TRANSACTION in, answers out, no socket.

    python benchmarks/transactions.py [--rounds 20] [--in-flight 32]

Each read has --in-flight half messages of 1 KiB, and before each the oneway request that commits one of the previous
read, as from as many threads of a producer. Prints the least and the median of the rounds in microseconds a
transaction, how long a start takes that computes the state of 100,000 half messages from the log, and the longest
pause of a round of checks over them.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain, zip_longest
from pathlib import Path

import trio
from sends import Sink, new_connection, request

from martlet.broker import Broker
from martlet.contracts import Producers, Transactions
from martlet.message import encode_properties
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_remoting.codec import FrameBuffer, encode_command
from martlet_remoting.codes import FLAG_ONEWAY
from martlet_remoting.config import RemotingConfig
from martlet_remoting.context import RemotingState
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.packets import Command
from martlet_tx.checks import Checks
from martlet_tx.config import TxConfig
from martlet_tx.held import HeldTransactions
from martlet_tx.plugin import TxPlugin

READS = 30
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
    async with serving(Path(folder), store=StoreConfig(flush="async")) as served, trio.open_nursery() as nursery:
        broker = served.broker
        broker.topics.update("T")
        broker.capabilities |= plugin.martlet_capabilities(broker)
        broker.set_stages([("tx", stage) for stage in plugin.martlet_stages(broker)])
        for projection in plugin.martlet_projections(broker):
            broker.projections.add("tx", projection)
        began = time.perf_counter()
        await broker.projections.replay()
        print(f"start: {time.perf_counter() - began:6.2f} s to compute the state")
        nursery.start_soon(broker.projections.run)
        yield broker
        nursery.cancel_scope.cancel()


def halves(number: int, count: int) -> list[bytes]:
    """The sends of *count* half messages."""
    made = []
    for i in range(count):
        key = f"7F00000100002A139B4700{number:06d}{i:04d}".ljust(32, "0")[:32]
        properties = {"UNIQ_KEY": key, "WAIT": "true", "TAGS": "TagA", "TRAN_MSG": "true", "PGROUP": "g"}
        made.append(request(310, encode_properties(properties), b"x" * 1024, i, False))
    return [each.replace(b'"f":"0"', b'"f":"4"') for each in made]


def ends(answers: list[Command]) -> list[bytes]:
    """The END_TRANSACTION of each half message, without an answer, as clients send it."""
    made = []
    for i, answer in enumerate(answers):
        ext = {"producerGroup": "g", "tranStateTableOffset": answer.ext["queueOffset"], "commitOrRollback": COMMIT}
        ext |= {"commitLogOffset": int(str(answer.ext["msgId"])[-16:], 16), "fromTransactionCheck": "false"}
        made.append(encode_command(Command(37, ext | {"msgId": answer.ext["transactionId"]}, b"", i, FLAG_ONEWAY)))
    return made


async def commits(rounds: int, in_flight: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with running(folder) as broker:
            peer, connection = Keeper(), new_connection()
            handler = RemotingHandler(RemotingState(broker, RemotingConfig()), peer, connection)

            def take(data: bytes) -> float:
                began = time.process_time()
                connection.receive_data(data, 0.0)
                for command in connection.events():
                    handler.handle(command)
                broker.store.commit()
                return time.process_time() - began

            costs, answers = [], list[Command]()
            for number in range(rounds):
                spent = 0.0
                for read in range(READS):
                    pairs = zip_longest(ends(answers), halves(number * READS + read, in_flight), fillvalue=b"")
                    spent += take(b"".join(chain.from_iterable(pairs)))
                    answers = list(peer.frames.commands())
                    assert [answer.code for answer in answers] == [0] * in_flight
                costs.append(spent * 1e6 / (READS * in_flight))
                await trio.sleep(0.02)
            take(b"".join(ends(answers)))
            queues = [broker.store.queue("T", queue_id) for queue_id in range(8)]
            assert sum(queue.next_offset for queue in queues) == rounds * READS * in_flight
            least, median = min(costs), statistics.median(costs)
            print(f"transaction of 1 KiB, {in_flight} in flight: least {least:6.2f} us, median {median:6.2f} us")


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
                    handler.handle(command)
                broker.store.commit()
                list(peer.frames.commands())
                await trio.lowlevel.checkpoint()
            asked = 0

            def check(*arguments: object) -> bool:
                nonlocal asked
                asked += 1
                return True

            broker.capabilities[Producers] = Producers(check)
            held = broker.capability(Transactions)
            assert isinstance(held, HeldTransactions)
            await trio.sleep(0.5)
            longest = 0.0

            async def watch() -> None:
                nonlocal longest
                while True:
                    began = time.perf_counter()
                    await trio.lowlevel.checkpoint()
                    longest = max(longest, time.perf_counter() - began)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                began = time.process_time()
                await Checks(broker, CONFIG, held).round()
                spent = time.process_time() - began
                nursery.cancel_scope.cancel()
            print(f"a round of {asked} checks: {spent:6.2f} s of CPU, longest pause {longest * 1000:5.1f} ms")
        forget(Path(folder))
        async with running(folder):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--in-flight", type=int, default=32)
    words = parser.parse_args()
    trio.run(commits, words.rounds, words.in_flight)
    trio.run(checks)


if __name__ == "__main__":
    main()
