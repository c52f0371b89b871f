"""What a message of an external transaction costs inside the process: staged and committed, no socket.

    python benchmarks/external_transactions.py [--messages 20000] [--size 1024] [--rounds 5] [--flush async]

Each transaction is staged in chunks of 1,000 messages and committed. Beside it, batches of the same messages are sent
(SEND_BATCH_MESSAGE). Prints the least of the rounds in microseconds of processor time a message, and how long
tasks hold the event loop during a commit.
"""

import argparse
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

import trio
from sends import Sink

from martlet.broker import Broker
from martlet.contracts import ExternalTransactions, Identity
from martlet.state import Projection
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command
from martlet_tx.config import TxConfig
from martlet_tx.external.transactions import StagedTransactions
from martlet_tx.plugin import TxPlugin

TOPIC = "External"
CHUNK = 1000
SEND = {"a": "P", "b": TOPIC, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1732000000000, "h": 0, "j": 0}


class Talk:
    """A connection without a socket."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.sink = Sink()
        self.sink.identity = Identity()
        self.connection = RemotingConnection(16 << 20, 60.0, 0.0)
        self.handler = RemotingHandler(RemotingState(broker, RemotingConfig()), self.sink, self.connection)

    async def ask(self, code: int, ext: dict[str, object], body: bytes) -> None:
        work: Awaitable[None] | None = self.handler.handle(Command(code, ext, body))
        if work is not None:
            await work
        self.broker.store.committer.commit()
        assert self.handler.context.state.counters.refusals == {}, self.handler.context.state.counters.refusals


class Turns(trio.abc.Instrument):
    """Measures how long each task holds the event loop, from one checkpoint to the next."""

    def __init__(self) -> None:
        self.found: list[tuple[float, str]] = []
        self._began = float("inf")

    def begin(self) -> None:
        """Measure from the next step on."""
        self._began = float("inf")
        trio.lowlevel.add_instrument(self)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began < float("inf"):
            self.found.append(((time.thread_time() - self._began) * 1000, task.name))
        self._began = float("inf")

    def __str__(self) -> str:
        found = sorted(self.found)
        middle, late, (longest, name) = found[len(found) // 2], found[len(found) * 99 // 100], found[-1]
        return f"{middle[0]:.2f} ms, p99 {late[0]:.2f} ms, longest {longest:.2f} ms of {name}"


async def measure(broker: Broker, staged: StagedTransactions, arguments: argparse.Namespace) -> None:
    talk = Talk(broker)
    body = encode_batch([BatchMessage(b"x" * arguments.size, b"TAGS\x01spark\x02KEYS\x01key\x02")] * CHUNK)
    chunks = arguments.messages // CHUNK
    costs: dict[str, list[float]] = {"sent": [], "staged": [], "committed": []}
    turns = Turns()

    async def timed(name: str, work: Awaitable[object]) -> None:
        began = time.process_time()
        await work
        costs[name].append((time.process_time() - began) * 1e6 / arguments.messages)

    async def send() -> None:
        for _ in range(chunks):
            await talk.ask(RequestCode.SEND_BATCH_MESSAGE, {**SEND}, body)

    async def stage(sequence: int) -> None:
        name = {"producer": "query", "epoch": 0, "sequence": sequence, "part": "p"}
        for chunk in range(chunks):
            await talk.ask(RequestCode.STAGE_EXTERNAL_MESSAGES, {**SEND, **name, "chunk": chunk}, body)

    await talk.ask(RequestCode.SEND_BATCH_MESSAGE, {**SEND}, body)  # creates the queue and its first files
    for sequence in range(arguments.rounds):
        await timed("sent", send())
        await timed("staged", stage(sequence))
        ext = {"producer": "query", "epoch": 0, "sequence": sequence}
        turns.begin()
        await timed(
            "committed", talk.ask(RequestCode.COMMIT_EXTERNAL_TRANSACTION, ext, b'{"parts": [["p", %d]]}' % chunks)
        )
        trio.lowlevel.remove_instrument(turns)
    for name, found in costs.items():
        print(f"{name:>10}: {min(found):6.2f} us a message")
    print(f"turns of the event loop in a commit: median {turns}")


async def main(arguments: argparse.Namespace) -> None:
    plugin = TxPlugin(TxConfig())

    def install(broker: Broker) -> Sequence[Projection]:
        broker.topics.update(TOPIC)
        broker.capabilities |= plugin.martlet_capabilities(broker)
        broker.set_stages([("tx", stage) for stage in plugin.martlet_stages(broker)])
        return plugin.martlet_projections(broker)

    with tempfile.TemporaryDirectory() as folder:
        store = StoreConfig(flush=arguments.flush)
        async with serving(Path(folder), store=store, projections=install) as served, trio.open_nursery() as nursery:
            staged = served.broker.capability(ExternalTransactions)
            assert isinstance(staged, StagedTransactions)
            await nursery.start(staged.run)
            await measure(served.broker, staged, arguments)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flush", choices=("sync", "async"), default="async")
    trio.run(main, parser.parse_args())
