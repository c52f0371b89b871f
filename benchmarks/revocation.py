"""The time until each of very many clients learns that its rights are revoked, and the pauses of the event loop.

    python benchmarks/revocation.py [--connections 10000] [--kinds mqtt,session,share,stomp,queue,pull,pop,bulk]

A broker runs in this process, and a process of its own has the clients, each a user of its own on a connection of its
own, with the kinds in turn:

- mqtt: a subscription of MQTT 5 with QoS 1; session: the same of a stored session; share: a shared subscription;
- stomp: a topic; queue: a queue, with acknowledgements;
- pull, pop, bulk: a request of a RocketMQ client that waits at the end of a queue.

All are idle. Then, each with new clients: the rules deny every one of them (rules), the broker ends every login
(logins), the rules change and deny nobody (nothing), or deny one user in a hundred (some). Prints for each change the
time until a denied client got its refusal or was disconnected (median, 99th percentile, longest), until the broker had
freed all of them, and the longest and second longest turn of the event loop in processor time, which other work on the
machine hardly lengthens, in ms.
"""

import argparse
import gc
import logging
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from martlet.broker import Broker
from martlet.contracts import ANONYMOUS, Credentials, Identity, LoginOrigin, Password, Protocol, Service, SignedRequest
from martlet.runtime.gc_schedule import OldObjects
from martlet.settings import DeliveryConfig, ServerConfig
from martlet.store import StoreConfig
from martlet.testing.peers import Serving, serving
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V5
from martlet_mqtt.wire.packets import Connect, FilterSubscription, Subscribe
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property
from martlet_remoting.config import RemotingConfig
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.codec import encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_stomp.config import StompConfig
from martlet_stomp.plugin import StompPlugin

KINDS = ("mqtt", "session", "share", "stomp", "queue", "pull", "pop", "bulk")
CHANGES = ("nothing", "some", "rules", "logins")
GROUPS = 100
HELD_MS = 600_000
AIM_S, AIM_TURN_MS = 1.0, 10.0


def talk_of(kind: str, number: int) -> tuple[str, list[tuple[bytes, bytes]]]:
    """Return the protocol of a client, and what it sends, each with the beginning of its answer; empty for none."""
    user = f"user{number}"
    if kind in ("mqtt", "session", "share"):
        keeps = Properties({Property.SESSION_EXPIRY: 3600}) if kind == "session" else NO_PROPERTIES
        connect = Connect(user, V5, user_name=user, password=b"x", keep_alive_s=0, properties=keeps)
        topic_filter = f"$share/g{number % GROUPS}/a/#" if kind == "share" else f"a/{number}/#"
        subscribe = Subscribe(1, (FilterSubscription(topic_filter, 1),))
        return "mqtt", [(encode_packet(connect, V5), b"\x20"), (encode_packet(subscribe, V5), b"\x90")]
    if kind in ("stomp", "queue"):
        connect_frame = f"CONNECT\naccept-version:1.2\nhost:h\nlogin:{user}\npasscode:x\n\n\0".encode()
        destination = "/topic/T" if kind == "stomp" else f"/queue/Q{number % GROUPS}"
        ack = "auto" if kind == "stomp" else "client-individual"
        frame = f"SUBSCRIBE\nid:1\ndestination:{destination}\nack:{ack}\nreceipt:r\n\n\0".encode()
        return "stomp", [(connect_frame, b"CONNECTED"), (frame, b"RECEIPT")]
    signed = {"AccessKey": user, "Signature": "x"}
    if kind == "pull":
        ext: dict[str, object] = {
            "consumerGroup": f"G{number % GROUPS}", "topic": "T", "queueId": "0", "queueOffset": "0",
            "maxMsgNums": "32", "sysFlag": "6", "commitOffset": "0", "suspendTimeoutMillis": str(HELD_MS),
            "subscription": "*", "subVersion": "0", "expressionType": "TAG", **signed,
        }  # fmt: skip
        return "remoting", [(encode_command(Command(RequestCode.PULL_MESSAGE, ext, b"", 1)), b"")]
    if kind == "pop":
        ext = {
            "consumerGroup": f"P{number % GROUPS}", "topic": "T", "queueId": "-1", "maxMsgNums": "32",
            "invisibleTime": "30000", "pollTime": str(HELD_MS), "bornTime": "0", "initMode": "0", "expType": "TAG",
            "exp": "*", "order": "false", **signed,
        }  # fmt: skip
        return "remoting", [(encode_command(Command(RequestCode.POP_MESSAGE, ext, b"", 1)), b"")]
    ext = {"topic": "T", "queueId": "0", "offset": "0", "waitMs": str(HELD_MS), **signed}
    return "remoting", [(encode_command(Command(RequestCode.BULK_READ, ext, b"", 1)), b"")]


# the process of the clients


def be_clients(connections: int, kinds: Sequence[str], ports: Sequence[str]) -> None:
    """Connect, wait for a line on stdin, and print for each client when it heard something, in ns, or 0."""
    addresses = dict(port.split("=") for port in ports)
    sockets: list[socket.socket] = []
    for number in range(connections):
        protocol, talk = talk_of(kinds[number % len(kinds)], number)
        host, _, port = addresses[protocol].rpartition(":")
        opened = socket.create_connection((host, int(port)))
        for sent, answer in talk:
            opened.sendall(sent)
            if answer:
                received = opened.recv(4096)
                assert received.startswith(answer), (kinds[number % len(kinds)], received)
        opened.setblocking(False)
        sockets.append(opened)
    poll = select.epoll()
    for opened in sockets:
        poll.register(opened.fileno(), select.EPOLLIN)
    heard = dict.fromkeys([opened.fileno() for opened in sockets], 0)
    print("ready", flush=True)
    sys.stdin.readline()
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        ready = poll.poll(0.2, 1024)
        now = time.monotonic_ns()
        for fd, _ in ready:
            heard[fd] = now
            poll.unregister(fd)
        if select.select([sys.stdin], [], [], 0)[0]:
            break
    print(" ".join(map(str, heard.values())), flush=True)
    for opened in sockets:
        opened.close()


# the broker


class Probe:
    """Measures the turns of the event loop, in seconds of processor time."""

    def __init__(self) -> None:
        self.turns: list[float] = [0.0, 0.0]

    async def run(self) -> None:
        """Turn with the loop until cancelled."""
        while True:
            used = time.thread_time()
            await trio.lowlevel.checkpoint()
            used = time.thread_time() - used
            if used > self.turns[0]:
                self.turns = sorted([*self.turns, used])[-2:]


def believe(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
    if isinstance(credentials, Password):
        return Identity(credentials.user)
    return Identity(credentials.access_key) if isinstance(credentials, SignedRequest) else None


class Rules:
    """Allows everything, but nothing to ``denied`` users."""

    def __init__(self) -> None:
        self.denies: Callable[[str], bool] = lambda name: False

    def __call__(self, identity: Identity, action: str, name: str) -> bool:
        return not self.denies(identity.name)


async def measure(
    running: Serving,
    remoting: RemotingPlugin,
    rules: Rules,
    change: str,
    connections: int,
    kinds: Sequence[str],
    ports: Sequence[str],
) -> bool:
    """Let new clients wait, change something, and print what became of them; return whether the aims were reached."""
    command = [sys.executable, __file__, "--clients", str(connections), "--kinds", ",".join(kinds)]
    process = await trio.lowlevel.open_process(
        [*command, "--ports", *ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert await receive_line(process.stdout) == b"ready\n"
    await trio.sleep(1)
    gc.collect()
    await process.stdin.send_all(b"go\n")
    await trio.sleep(0.5)
    probe = Probe()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe.run)
        await trio.sleep(0.2)
        probe.turns = [0.0, 0.0]
        begun, ended = time.monotonic_ns(), connections if change in ("rules", "logins") else 0
        if change == "logins":
            running.broker.end_clients(lambda identity: identity != ANONYMOUS, "an administrator ended it")
        else:
            if change != "nothing":
                modulus = 1 if change == "rules" else 100
                ended = connections // modulus
                rules.denies = lambda name: int(name[4:] or 0) % modulus == 0
            running.broker.rules.changed()
        freed_s = await wait_freed(running, remoting, connections - ended)
        nursery.cancel_scope.cancel()
    await trio.sleep(1)
    await process.stdin.send_all(b"done\n")
    data = await receive_line(process.stdout)
    await process.wait()
    rules.denies = lambda name: False
    running.broker.rules.changed()
    times = sorted((int(each) - begun) / 1e9 for each in data.split() if int(each))
    turn_ms, second_ms = sorted((each * 1000 for each in probe.turns), reverse=True)
    missing = f"  {ended - len(times)} got no refusal" if len(times) != ended else ""
    parts = [times[min(int(len(times) * part), len(times) - 1)] if times else 0.0 for part in (0.5, 0.99, 1)]
    figures = "".join(f"{each * 1000:9.0f}" for each in (*parts, freed_s))
    print(f"{change:10}{len(times):7}{figures}{turn_ms:9.1f}{second_ms:9.1f}{missing}", flush=True)
    return parts[1] <= AIM_S and turn_ms <= AIM_TURN_MS and not missing


async def receive_line(stream: trio.abc.ReceiveStream) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = await stream.receive_some(1 << 20)
        assert more, "the clients have failed"
        data += more
    return data


async def wait_freed(running: Serving, remoting: RemotingPlugin, left: int) -> float:
    """Return how long it takes until only *left* clients are connected or have a request that waits, in s."""
    begun = time.monotonic()
    while time.monotonic() - begun < 60:
        await trio.sleep(0.01)
        state = remoting.state
        waiting = len(state.parked) + state.pops.waiting + state.bulk_reads.count
        connected = running.server.statistics()["connections"]
        assert isinstance(connected, int)
        if not running.broker.revocation.is_visiting and connected - len(state.contexts) + waiting <= left:
            break
    return time.monotonic() - begun


async def bench(connections: int, kinds: Sequence[str], changes: Sequence[str]) -> int:
    remoting = RemotingPlugin(RemotingConfig(listen="127.0.0.1:0", vip=False, suspend_ms_max=HELD_MS))
    mqtt = MqttPlugin(MqttConfig(listen="127.0.0.1:0"))
    stomp = StompPlugin(StompConfig(listen="127.0.0.1:0"))
    ports: list[str] = []

    def bound(name: str) -> Callable[[str], None]:
        return lambda address: ports.append(f"{name}={address}")

    def protocols(broker: Broker) -> list[Protocol]:
        broker.authentication.authenticators = (believe,)
        broker.topics.ensure("T", 1)
        own = mqtt.protocol(broker, bound("mqtt")), stomp.protocol(broker, bound("stomp"))
        return [*own, *remoting.martlet_protocols(broker)]

    def services(broker: Broker) -> list[Service]:
        return [each for plugin in (mqtt, stomp, remoting) for each in plugin.martlet_services(broker)]

    with tempfile.TemporaryDirectory(prefix="martlet-revocation-") as folder:
        async with serving(
            Path(folder),
            store=StoreConfig(flush="async"),
            server=ServerConfig(connections_max=connections + 100),
            delivery=DeliveryConfig(subscriptions_max=connections),
            ports=protocols,
            projections=mqtt.martlet_projections,
            services=services,
        ) as running:
            rules = Rules()
            running.broker.authorizers = (rules,)
            OldObjects().start()  # as `martlet run` does at its start
            ports.append(f"remoting={remoting.addresses['remoting']}")
            print(f"{connections} connections: {', '.join(kinds)}")
            print("change    refused   median      99%  longest    freed     turn   second")
            reached = [await measure(running, remoting, rules, change, connections, kinds, ports) for change in changes]
    print(f"aims, {AIM_S * 1000:g} ms and {AIM_TURN_MS:g} ms: {'reached' if all(reached) else 'missed'}")
    return 0 if all(reached) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--changes", default=",".join(CHANGES))
    parser.add_argument("--clients", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--ports", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kinds = options.kinds.split(",")
    if options.clients:
        be_clients(options.clients, kinds, options.ports)
        return 0
    logging.disable(logging.WARNING)
    return trio.run(bench, options.connections, kinds, options.changes.split(","))


if __name__ == "__main__":
    sys.exit(main())
