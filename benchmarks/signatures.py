"""What signatures cost: sends, pulls, and pops with acknowledgements, as RocketMQ's clients sign them with an ACL.

    python benchmarks/signatures.py [--rounds 60] [--widths 1 40]
    python benchmarks/signatures.py --sockets [--rounds 8]

Three brokers take turns in each round, each as the first one, so that the machine's moods meet all of them: without an
authenticator, with one and unsigned requests, and with one and signed requests. Prints the least processor time of all
rounds in microseconds, and its ratio to that without an authenticator. Without --sockets one process passes frames to
the handler and writes the log, as `sends.py` and `pops.py` do. With --sockets the brokers are processes of their own,
and one client sends 1 KiB with 64 requests in flight; their clocks tick every 10 ms, so a round takes a second. On an
older checkout the authenticator verifies each request.
"""

import argparse
import hmac
import json
import os
import re
import socket
import sys
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import trio
from brokers import HERE, Process
from pops import COUNT, POP, POPS_AT_ONCE, acks
from sends import properties_of, set_stages

from martlet import contracts
from martlet.app.hooks import guarded_authenticator
from martlet.broker import Broker
from martlet.contracts import Identity, LoginOrigin, SignedRequest
from martlet.message import Message
from martlet.store import StoreConfig
from martlet.testing.peers import RecordingPeer, serving
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import SigningKey

KEY: Final = SigningKey("producer-1", "a secret of thirty-two characters")
NAMES: Final = ("no authenticator", "authenticator, unsigned", "authenticator, signed")
READS: Final = 60  # in a round
WINDOW: Final = 64
SENDS: Final = 40_000  # in a round over sockets


def authenticate(credentials: object, origin: LoginOrigin) -> object:
    """An authenticator that knows one key."""
    secret = KEY.secret.encode()
    if hasattr(contracts, "AccessKey") and isinstance(credentials, contracts.AccessKey):
        return contracts.SigningSecret(Identity(credentials.access_key), secret)
    if isinstance(credentials, SignedRequest):
        mac = b64encode(hmac.digest(secret, credentials.content, "sha1"))
        if hmac.compare_digest(mac, credentials.signature.encode()):
            return Identity(credentials.access_key)
        raise SystemExit("the signature is wrong")
    return None


class Bench:
    """One broker and one connection to it."""

    def __init__(self, broker: Broker, name: str) -> None:
        if name != NAMES[0]:
            broker.authentication.authenticators = (guarded_authenticator("users", authenticate),)
        self.signs = name == NAMES[2]
        self.broker = broker
        self.peer = RecordingPeer()
        self.connection = RemotingConnection(1 << 24, 120.0, 0.0)
        self.handler = RemotingHandler(RemotingState(broker, RemotingConfig()), self.peer, self.connection)
        self.spent_s = 0.0

    async def read(self, data: bytes) -> None:
        """Let the broker handle *data* as one socket read."""
        handle, began = self.handler.handle, time.process_time()
        self.connection.receive_data(data, 0.0)
        for event in self.connection.events():
            rest = handle(event)
            if rest is not None:
                await rest
        self.broker.store.committer.commit()
        if self.peer.wakes:
            self.peer.wakes = 0
            self.handler.collect(1 << 20)
        self.spent_s += time.process_time() - began

    def answers(self) -> list[Command]:
        frames = FrameBuffer()
        frames.receive_data(self.peer.take_sent())
        return list(frames.commands())


def frame(signs: bool, code: int, ext: Mapping[str, object], body: bytes = b"", opaque: int = 0) -> bytes:
    return encode_command(Command(code, KEY.sign(code, ext, body) if signs else ext, body, opaque))


def send_frame(signs: bool, body: bytes, number: int, i: int) -> bytes:
    ext = {"a": "g", "b": "T", "c": "TBW102", "d": "4", "e": str(i % 4), "f": "0", "g": "1732000000000", "h": "0"}
    ext |= {"i": properties_of(number, i).decode(), "j": "0", "k": "false", "m": "false"}
    return frame(signs, RequestCode.SEND_MESSAGE_V2, ext, body, i)


Load = Callable[[Bench, int], Awaitable[int]]  # (bench, number of the round) -> number of messages or requests


def sends(count: int, body_bytes: int) -> Load:
    """*count* requests a read that send one message each."""

    async def load(bench: Bench, number: int) -> int:
        body = b"x" * body_bytes
        reads = [
            b"".join(send_frame(bench.signs, body, number * READS + place, i) for i in range(count))
            for place in range(READS)
        ]
        for data in reads:
            await bench.read(data)
        bench.peer.take_sent()
        return READS * count

    return load


def pulls(count: int) -> Load:
    """*count* pulls a read that find nothing and do not wait."""

    async def load(bench: Bench, number: int) -> int:
        ext = {"consumerGroup": "g", "topic": "T", "queueId": "7", "queueOffset": "0", "maxMsgNums": "32"}
        ext |= {"sysFlag": "0", "commitOffset": "0", "suspendTimeoutMillis": "0", "subVersion": "1"}
        data = b"".join(frame(bench.signs, RequestCode.PULL_MESSAGE, ext, opaque=i) for i in range(count))
        for _ in range(READS):
            await bench.read(data)
        bench.peer.take_sent()
        return READS * count

    return load


async def pops(bench: Bench, number: int) -> int:
    """Pop a backlog and acknowledge each of its messages with a request, as `pops.py` does."""
    messages = READS * COUNT
    for each in range(messages):
        bench.broker.publish(Message("P", b"x" * 256, b"TAGS\x01TagA\x02", each % 8))
    bench.broker.store.committer.commit()
    ext = {**POP, "topic": "P"}
    pop = b"".join(frame(bench.signs, RequestCode.POP_MESSAGE, ext, opaque=i) for i in range(POPS_AT_ONCE))
    taken, waiting = 0, b""
    while taken < messages:
        await bench.read(waiting + pop)
        requests = [one for said in bench.answers() if "msgOffsetInfo" in said.ext for one in acks(said, batch=False)]
        waiting = b"".join(frame(bench.signs, one.code, {**one.ext, "topic": "P"}) for one in requests)
        taken += len(requests)
    await bench.read(waiting)
    bench.peer.take_sent()
    return messages


async def compare(title: str, load: Load, rounds: int) -> None:
    async with AsyncExitStack() as stack:
        benches: list[Bench] = []
        for name in NAMES:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            served = await stack.enter_async_context(serving(folder, store=StoreConfig(flush="async")))
            for topic in "T", "P":
                served.broker.topics.update(topic)
            await set_stages(served.broker)
            benches.append(Bench(served.broker, name))
        least = [float("inf")] * len(benches)
        for number in range(rounds):
            for turn in range(len(benches)):
                place = (number + turn) % len(benches)
                bench = benches[place]
                bench.spent_s = 0.0
                count = await load(bench, number)
                least[place] = min(least[place], bench.spent_s * 1e6 / count)
                await trio.sleep(0.005)
    show(title, least)


def show(title: str, least: list[float]) -> None:
    for name, cost in zip(NAMES, least, strict=True):
        print(f"{title}, {name}: least {cost:.2f} us, ratio {cost / least[0]:.2f}", flush=True)


# sockets


class Client:
    """One connection to a broker in a process of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        plugins = ["remoting", *(["users"] if name != NAMES[0] else [])]
        settings = [f"plugins.enabled={json.dumps(plugins)}", "remoting.listen=127.0.0.1:0", "store.flush=async"]
        if name != NAMES[0]:
            user = f'[users.{KEY.access_key}]\nsigning_key = "{KEY.secret}"\nrules = ["publish *"]\n'
            (folder / "users.toml").write_text(user + '[anonymous]\nrules = ["publish *"]\n')
            settings.append(f"users.file={json.dumps(str(folder / 'users.toml'))}")
        words = [word for each in settings for word in ("--set", each)]
        command = [sys.executable, "-m", "martlet", "run", "--data", str(folder / "store"), *words]
        self.broker = Process(command, folder / "broker.log")
        while (found := re.search(r"ready: remoting=127\.0\.0\.1:(\d+)", self.broker.log.read_text())) is None:
            time.sleep(0.05)
        self.signs = name == NAMES[2]
        self._peer = socket.create_connection(("127.0.0.1", int(found[1])))
        self._frames = FrameBuffer()
        self._in_flight = 0

    def cost_us(self) -> float:
        """Return the processor time per message of `SENDS` messages of 1 KiB, `WINDOW` of them in flight."""
        frames = [send_frame(self.signs, b"x" * 1024, 1, i) for i in range(WINDOW)]
        half = WINDOW // 2
        parts = b"".join(frames[:half]), b"".join(frames[half:])
        began = self.broker.cpu_s()
        for turn in range(SENDS // half):
            self._peer.sendall(parts[turn % 2])
            self._in_flight += half
            self._wait_answers(half)
        self._wait_answers(0)
        return (self.broker.cpu_s() - began) * 1e6 / SENDS

    def _wait_answers(self, left: int) -> None:
        """Read answers until only *left* requests are in flight."""
        while self._in_flight > left:
            self._frames.receive_data(self._peer.recv(1 << 20))
            for answer in self._frames.commands():
                assert answer.code == 0, answer
                self._in_flight -= 1


def add_users_plugin(folder: Path) -> None:
    """Let brokers find the plugin of examples/martlet-users, as an installer does."""
    metadata = folder / "martlet_users-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: martlet-users\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[martlet.plugins]\nusers = martlet_users:UsersPlugin\n")
    users = str(HERE.parent / "examples" / "martlet-users")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(folder), users, os.environ.get("PYTHONPATH", "")))


def compare_processes(rounds: int) -> None:
    with ExitStack() as stack:
        add_users_plugin(Path(stack.enter_context(TemporaryDirectory())))
        clients: list[Client] = []
        for name in NAMES:
            clients.append(Client(Path(stack.enter_context(TemporaryDirectory())), name))
            stack.callback(clients[-1].broker.stop)
        least = [float("inf")] * len(clients)
        for number in range(rounds + 1):
            for turn in range(len(clients)):
                place = (number + turn) % len(clients)
                cost = clients[place].cost_us()
                if number:  # the first round warms up
                    least[place] = min(least[place], cost)
    show(f"send 1024 B over a socket, {WINDOW} in flight", least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 40], help="requests a read")
    parser.add_argument("--sockets", action="store_true", help="measure brokers in processes of their own")
    words = parser.parse_args()
    if words.sockets:
        compare_processes(words.rounds)
        return
    for count in words.widths:
        for body_bytes in (128, 1024):
            trio.run(compare, f"{count:2} sends a read of {body_bytes:4} B", sends(count, body_bytes), words.rounds)
        trio.run(compare, f"{count:2} pulls a read", pulls(count), words.rounds)
    trio.run(compare, "a pop of 32 and 32 acks", pops, words.rounds)


if __name__ == "__main__":
    main()
