"""What popping a backlog costs inside the process, from the bytes of the requests to the bytes of the answers.

    python benchmarks/pops.py [--rounds 20] [--queues 8] [--held 100000]

A consumer pops 32 messages of 256 bytes at a time out of --queues queues and acknowledges them: each with a request of
its own, as RocketMQ's Java client does, or all of a pop with one BATCH_ACK_MESSAGE. Four pops and the acknowledgements
of the four before arrive in one socket read; then comes the commit, which writes what the group notes. Prints the least
and the median of many rounds, in microseconds a message, how many messages a second that is for one processor, and how
many bytes the notes take in the log. Beside another checkout: `beside.py`. Then consumers are killed that hold very
many messages: prints when the last one came again, and the longest turn of the event loop.
"""

import argparse
import gc
import math
import re
import statistics
import tempfile
import time
from base64 import b64encode
from pathlib import Path

import orjson
import trio

from martlet.message import Message
from martlet.store import StoreConfig
from martlet.testing.peers import RecordingPeer, Serving, serving
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.pop_handles import Handle

POPS_AT_ONCE = 4
COUNT = 32
MESSAGES = 16 * 1024
POP = {
    "consumerGroup": "G",
    "topic": "T",
    "queueId": "-1",
    "maxMsgNums": str(COUNT),
    "invisibleTime": "60000",
    "pollTime": "15000",
    "bornTime": "0",
    "initMode": "0",
    "expType": "TAG",
    "exp": "*",
    "order": "false",
}


class Client:
    """A client whose requests are made before the clock runs."""

    def __init__(self, served: Serving) -> None:
        self.store = served.broker.store
        self.state = RemotingState(served.broker, RemotingConfig())
        self.peer = RecordingPeer()
        self.connection = RemotingConnection(1 << 24, 120, 0.0)
        self.handler = RemotingHandler(self.state, self.peer, self.connection)
        self.spent = 0.0

    async def send(self, frames: bytes) -> list[Command]:
        """Let the broker handle *frames* as one socket read, and return its answers."""
        clock = time.process_time
        began = clock()
        self.connection.receive_data(frames, 0.0)
        for event in self.connection.events():
            rest = self.handler.handle(event)
            if rest is not None:  # after each thousand requests, as the server does
                await rest
        self.store.committer.commit()
        if self.peer.wakes:
            self.peer.wakes = 0
            self.handler.collect(1 << 20)
        self.spent += clock() - began
        answers = FrameBuffer()
        answers.receive_data(self.peer.take_sent())
        return list(answers.commands())


def acks(answer: Command, *, batch: bool) -> list[Command]:
    """Return the requests that acknowledge what *answer* has."""
    pop_ms, first = answer.integer("popTime"), {}
    for text in answer.text("startOffsetInfo").split(";"):
        _, queue_id, start = text.split(" ")
        first[queue_id] = int(start)
    found: list[Command] = []
    parts: list[dict[str, object]] = []
    for text in answer.text("msgOffsetInfo").split(";"):
        _, queue_id, listed = text.split(" ")
        offsets, start = list(map(int, listed.split(","))), first[queue_id]
        bits = sum(1 << (offset - start) for offset in offsets)
        data = b64encode(bits.to_bytes((max(offsets) - start) // 8 + 1, "little")).decode()
        part = {"c": "G", "t": "T", "r": "0", "so": start, "q": int(queue_id), "rq": 0, "pt": pop_ms, "it": 60000}
        parts.append({**part, "b": data})
        for offset in offsets:
            handle = Handle(start, pop_ms, 60000, 0, "0", "martlet", int(queue_id), offset)
            ext = {"consumerGroup": "G", "topic": "T", "queueId": queue_id, "extraInfo": str(handle)}
            found.append(Command(RequestCode.ACK_MESSAGE, {**ext, "offset": str(offset)}))
    if not batch:
        return found
    body = orjson.dumps({"brokerName": "martlet", "acks": parts})
    return [Command(RequestCode.BATCH_ACK_MESSAGE, body=body)]


async def consume(client: Client, *, batch: bool) -> int:
    """Pop the backlog and acknowledge it; return how many bytes of notes that stored."""
    began, taken = client.store.appended, 0
    pops = b"".join([encode_command(Command(RequestCode.POP_MESSAGE, POP, opaque=number)) for number in range(4)])
    assert POPS_AT_ONCE == 4
    waiting = b""
    while taken < MESSAGES:
        answers = [answer for answer in await client.send(waiting + pops) if "msgOffsetInfo" in answer.ext]
        taken += sum(len(re.split("[,;]", answer.text("msgOffsetInfo"))) for answer in answers)
        requests = [request for answer in answers for request in acks(answer, batch=batch)]
        waiting = b"".join(map(encode_command, requests))
    await client.send(waiting)
    return client.store.appended - began


async def run(rounds: int, queues: int, *, batch: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async", keys_index=False)) as served:
            broker = served.broker
            broker.topics.update("T", read_queues=queues, write_queues=queues)
            client, costs, noted = Client(served), [], 0
            for _ in range(rounds):
                for number in range(MESSAGES):
                    broker.publish(Message("T", b"x" * 256, b"TAGS\x01TagA\x02", number % queues))
                broker.store.committer.commit()
                client.spent = 0.0
                noted += await consume(client, batch=batch)
                costs.append(client.spent * 1e6 / MESSAGES)
                await trio.sleep(0.02)
                every = [broker.store.queue("T", queue_id) for queue_id in range(queues)]
                assert all(broker.groups.offsets.get("G", "T", queue.queue_id) == queue.next_offset for queue in every)
            least, median = min(costs), statistics.median(costs)
            kind = f"{'one batch a pop' if batch else 'one by one'}, {queues} queues"
            print(
                f"acknowledged {kind:28}: least {least:5.2f} us, median {median:5.2f} us,"
                f" {1e6 / least:9,.0f} messages/s; notes {noted / rounds / MESSAGES:.2f} B a message"
            )


class Turns(trio.abc.Instrument):
    """Measures the longest turn of the event loop, in processor time."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._began = math.inf

    def after_io_wait(self, timeout: float) -> None:
        self._began = time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        self.longest = max(self.longest, time.thread_time() - self._began)


async def expire(count: int, queues: int) -> None:
    """Let consumers die that hold *count* messages, and pop all of them again."""
    invisible_s = 20.0  # longer than the first pops take
    ext = {**POP, "invisibleTime": str(round(invisible_s * 1000)), "pollTime": "0"}
    pops = b"".join([encode_command(Command(RequestCode.POP_MESSAGE, ext, opaque=n)) for n in range(POPS_AT_ONCE)])

    async def pop_all(client: Client) -> None:
        taken = 0
        while taken < count:
            answers = [answer for answer in await client.send(pops) if "msgOffsetInfo" in answer.ext]
            taken += sum(len(re.split("[,;]", answer.text("msgOffsetInfo"))) for answer in answers)
            await trio.lowlevel.checkpoint()

    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async", keys_index=False)) as served:
            broker = served.broker
            broker.topics.update("T", read_queues=queues, write_queues=queues)
            for number in range(count):
                broker.publish(Message("T", b"x" * 256, b"TAGS\x01TagA\x02", number % queues))
            broker.store.committer.commit()
            await broker.store.flusher.wait_flushed(broker.store.written)
            await pop_all(Client(served))
            end = trio.current_time() + invisible_s
            gc.collect()
            gc.freeze()
            trio.lowlevel.add_instrument(turns)
            await trio.sleep_until(end)
            ended, turns.longest = turns.longest, 0.0
            began = time.thread_time()
            with trio.fail_after(300):
                await pop_all(Client(served))
            took, late = time.thread_time() - began, trio.current_time() - end
            print(f"{count} held by killed consumers: the last came {late:.2f} s after its invisible time;")
            trio.lowlevel.remove_instrument(turns)
            print(
                f"{took:.2f} s of processor time; longest turns {ended * 1000:.1f} ms before,"
                f" {turns.longest * 1000:.1f} ms while they come"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--queues", type=int, default=8)
    parser.add_argument("--held", type=int, default=100_000)
    words = parser.parse_args()
    for batch in (False, True) if words.rounds else ():
        trio.run(lambda batch=batch: run(words.rounds, words.queues, batch=batch))
    if words.held:
        trio.run(expire, words.held, words.queues)


if __name__ == "__main__":
    main()
