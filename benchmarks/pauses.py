"""How long one request keeps everybody else waiting: the longest pause of the event loop while it runs.

    python benchmarks/pauses.py [REQUEST ...] [--limit-ms 10]

A broker and its name server run in this process, filled with topics, groups, offsets and messages; each request comes
from a process of its own, so that only the broker's work is seen. A probe on the event loop measures what passes
between its turns. Prints for each request, in ms: the longest and the second longest pause in processor time, which
other work on the machine hardly lengthens; the longest garbage collection, which is part of a pause; the longest pause
in real time, which waits for disks and processors as well; how long the answer took. Then, in MiB, how much memory this
process took at most while it ran.
"""

import argparse
import contextlib
import gc
import os
import random
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import trio

from martlet.app import saving
from martlet.broker import Broker
from martlet.contracts import Protocol
from martlet.message import Message, encode_properties
from martlet.runtime.gc_schedule import OldObjects
from martlet.store import StoreConfig
from martlet.tables.groups import Group
from martlet.testing.peers import Serving, serving
from martlet.testing.stores import ManualClock
from martlet_remoting.config import RemotingConfig
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.plugin import NameServerPlugin
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

TOPICS = 40_000
GROUPS = 20_000
# Not a request: all tables are written as if they had changed.
SAVE = "saving every table"
QUEUES_COMMITTED = 8
MESSAGES = 120_000
WIDE = 8192  # queues of one topic
MIB = 1 << 20
FIRST_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Request:
    """What one process sends; *many* connections each send it once, and it is answered as often."""

    command: Callable[[int], Command]
    port: str = "remoting"
    many: int = 1


def heartbeat(body: bytes) -> Callable[[int], Command]:
    return lambda number: Command(RequestCode.HEART_BEAT, {}, body, 1)


def wide_heartbeat(number: int) -> Command:
    groups = [{"groupName": f"many{n}", "subscriptionDataSet": [{"topic": "T", "subString": "*"}]} for n in range(1000)]
    return Command(RequestCode.HEART_BEAT, {}, orjson.dumps({"clientID": "c", "consumerDataSet": groups}), 1)


def expressions(number: int) -> Command:
    text = "||".join(f"{n:x}" for n in range(3000))
    found = [{"topic": f"e{n}", "subString": text} for n in range(60)]
    data = {"clientID": "c", "consumerDataSet": [{"groupName": "E", "subscriptionDataSet": found}]}
    return Command(RequestCode.HEART_BEAT, {}, orjson.dumps(data), 1)


def join(number: int) -> Command:
    return Command(
        RequestCode.HEART_BEAT, {}, b'{"clientID":"c%d","consumerDataSet":[{"groupName":"joined"}]}' % number, 1
    )


def ask(code: int, **ext: object) -> Callable[[int], Command]:
    return lambda number: Command(code, ext, b"", 1)


def text(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def deflated(topics: int, padding: int = 0) -> Callable[[int], Command]:
    def make(number: int) -> Command:
        parts = [text(b'{"counter":1}'), struct.pack(">i", topics)]
        parts += [text(b"flood%d-%d 8 8 6 SINGLE_TAG" % (os.getpid(), n)) for n in range(topics)]
        body = zlib.compress(b"".join([*parts, text(b"[]"), bytes(padding)]), 1)
        return registration(body, compressed=True)

    return make


def registration(body: bytes, **ext: object) -> Command:
    fields = {"clusterName": "c", "brokerName": "flood", "brokerId": 0, "brokerAddr": "flood:1", "haServerAddr": ""}
    return Command(RequestCode.REGISTER_BROKER, {**fields, **ext}, body, 1, version=479)


def plain_registration(number: int) -> Command:
    shape = {"readQueueNums": 8, "writeQueueNums": 8, "perm": 6, "topicSysFlag": 0, "attributes": {}, "order": False}
    table = {f"plain{n}": {**shape, "topicName": f"plain{n}", "topicFilterType": "SINGLE_TAG"} for n in range(80_000)}
    return registration(orjson.dumps({"topicConfigSerializeWrapper": {"topicConfigTable": table}}))


def locks(number: int) -> Command:
    queues = [{"brokerName": "martlet", "queueId": n, "topic": "Wide"} for n in range(WIDE)]
    body = {"consumerGroup": "L", "clientId": "c", "mqSet": queues}
    return Command(RequestCode.LOCK_BATCH_MQ, {}, orjson.dumps(body), 1)


def many_topics(number: int) -> Command:
    found = [{"topicName": f"made{n}", "readQueueNums": 8, "writeQueueNums": 8, "perm": 6} for n in range(5000)]
    return Command(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {}, orjson.dumps({"topicConfigList": found}), 1)


def wide_header(number: int) -> Command:
    return Command(RequestCode.GET_MAX_OFFSET, {f"{n}": "" for n in range(85_000)}, b"", 1)


EMPTIES = b'{"a":[' + b",".join([b"[]"] * 5_200_000) + b"]}"
DIALECT = b'{"clientID":"c","consumerDataSet":[{"groupName":"D","subscriptionDataSet":[%b]}]}' % b",".join(
    b'{0:1,"topic":"topic-of-some-length-%d","subString":"*","expressionType":"TAG","subVersion":1700000000000,'
    b'"tagsSet":[],"codeSet":[],"classFilterMode":false}' % n
    for n in range(4096)
)
MOVE = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
REQUESTS = {
    "nothing": Request(ask(RequestCode.GET_MAX_OFFSET, topic="T", queueId=0)),
    "heartbeat in a dialect": Request(heartbeat(DIALECT)),
    "heartbeat of 15 MB": Request(heartbeat(EMPTIES)),
    "heartbeat of empty arrays": Request(heartbeat(b'{"a":[' + b",".join([b"[]"] * 39_000) + b"]}")),
    "heartbeat of 1,000 groups": Request(wide_heartbeat),
    "heartbeat of long expressions": Request(expressions),
    "2,000 joins": Request(join, many=2000),
    "2,000 small requests": Request(ask(RequestCode.GET_MAX_OFFSET, topic="T", queueId=0), many=2000),
    "locks of all queues": Request(locks),
    "header of 1 MB": Request(wide_header),
    "all topics": Request(ask(RequestCode.GET_ALL_TOPIC_CONFIG)),
    "all groups": Request(ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)),
    "all offsets": Request(ask(RequestCode.GET_ALL_CONSUMER_OFFSET)),
    "consumers of a topic": Request(ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="T")),
    "statistics of a topic": Request(ask(RequestCode.GET_TOPIC_STATS_INFO, topic="Wide")),
    "statistics of all groups": Request(ask(RequestCode.GET_BROKER_CONSUME_STATS)),
    "reset of a wide topic": Request(ask(MOVE, topic="Wide", group="g1", timestamp=0)),
    "state of the broker": Request(ask(RequestCode.GET_BROKER_RUNTIME_INFO, counters="all")),
    "messages by a key that all have": Request(
        ask(RequestCode.QUERY_MESSAGE, topic="T", key="common", maxNum=64, beginTimestamp=0, endTimestamp=FIRST_MS)
    ),
    "a new topic": Request(
        ask(RequestCode.UPDATE_AND_CREATE_TOPIC, topic="New", readQueueNums=8, writeQueueNums=8, perm=6)
    ),
    "5,000 new topics": Request(many_topics),
    "deleting a wide topic": Request(ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic="Used")),
    "registration of 90,000 topics": Request(deflated(90_000), "nameserver"),
    "registration of 80,000 in JSON": Request(plain_registration, "nameserver"),
    "registration that inflates": Request(deflated(2, 1 << 28), "nameserver"),
    "list of all topics": Request(ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER), "nameserver"),
    "a text in the name server": Request(
        ask(RequestCode.PUT_KV_CONFIG, namespace="n", key="k", value="v"), "nameserver"
    ),
}


def fill(broker: Broker, clock: ManualClock, groups: int) -> None:
    """Put into *broker* what the requests ask for."""
    for number in range(TOPICS):
        broker.topics.ensure(f"topic{number}", 8)
    broker.topics.ensure("T", 1)
    broker.topics.ensure("Wide", WIDE)
    broker.topics.ensure("Used", WIDE)
    for number in range(groups):
        group = f"g{number}"
        broker.groups.update(Group(group))
        for queue_id in range(QUEUES_COMMITTED):
            broker.groups.offsets.commit(group, "T", queue_id, number)
    properties = encode_properties({"KEYS": "common"})
    broker.publish(Message("T", b"x", properties, queue_id=0))
    clock.ms += 60_000
    for number in range(MESSAGES):
        broker.publish(Message("T", b"x", properties, queue_id=0))
        if number % 1000 == 0:
            broker.store.committer.commit()
    for number in range(WIDE):
        broker.publish(Message("Used", b"x", b"", queue_id=number))
    broker.store.committer.commit()


@dataclass
class Probe:
    """Measures what happens between turns of the event loop, in seconds."""

    pauses: list[float] = field(default_factory=list)  # of this thread's processor time
    real: float = 0.0  # the longest pause of real time
    collecting: float = 0.0  # the longest garbage collection, which is part of a pause
    memory_bytes: int = 0
    _began: float = 0.0

    async def run(self) -> None:
        """Turn with the loop until cancelled."""
        gc.callbacks.append(self._collected)
        try:
            while True:
                used, now = time.thread_time(), time.perf_counter()
                await trio.sleep(0.0005)
                used = time.thread_time() - used
                self.real = max(self.real, time.perf_counter() - now)
                if used > 0.002:
                    self.pauses.append(used)
                    self.memory_bytes = max(self.memory_bytes, resident())
        finally:
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.collecting = max(self.collecting, time.thread_time() - self._began)


def resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure(name: str, addresses: dict[str, str]) -> Probe:
    """Let another process send request *name*; return what the loop had to wait meanwhile."""
    gc.collect()
    probe, before = Probe(), resident()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe.run)
        port = addresses[REQUESTS[name].port]
        process = await trio.run_process([sys.executable, __file__, "--send", name, "--to", port], capture_stdout=True)
        await trio.sleep(0.3)
        nursery.cancel_scope.cancel()
    slow, fast = sorted([0.0, 0.0, *probe.pauses])[-2:][::-1]
    grown = max(probe.memory_bytes - before, 0) / MIB
    took = process.stdout.decode().strip()
    times = "".join(f"{each * 1000:9.1f}" for each in (slow, fast, probe.collecting, probe.real))
    print(f"{name:34}{times}{took:>9}{grown:9.0f}", flush=True)
    return probe


async def measure_save(broker: Broker) -> Probe:
    """Write every table as if all had changed; return what the loop had to wait meanwhile."""
    gc.collect()
    probe = Probe()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe.run)
        await trio.sleep(0.1)
        probe.real = 0.0
        for table in (broker.topics.table, broker.groups.table, broker.groups.offsets.table):
            table.dirty = True
        begin = time.perf_counter()
        await saving._try_to_save(broker, offsets=True)
        took = time.perf_counter() - begin
        nursery.cancel_scope.cancel()
    slow, fast = sorted([0.0, 0.0, *probe.pauses])[-2:][::-1]
    times = "".join(f"{each * 1000:9.1f}" for each in (slow, fast, probe.collecting, probe.real))
    print(f"{SAVE:34}{times}{took * 1000:9.0f}", flush=True)
    return probe


async def send(name: str, address: str) -> None:
    """Be a client that sends request *name*; print how long the last answer took, in ms."""
    request = REQUESTS[name]
    host, _, port = address.rpartition(":")
    frames = [encode_command(request.command(number)) for number in range(request.many)]
    streams = [await trio.open_tcp_stream(host, int(port)) for _ in frames]
    await trio.sleep(0.5)  # the broker has nothing to do but what comes now
    begin = time.perf_counter()

    async def talk(stream: trio.abc.Stream, frame: bytes) -> None:
        with contextlib.suppress(trio.BrokenResourceError):  # the broker closed it: it may refuse so
            await listen(stream, frame)

    async def listen(stream: trio.abc.Stream, frame: bytes) -> None:
        await stream.send_all(frame)
        buffer = FrameBuffer(1 << 30, 1 << 28)
        while True:
            while (command := buffer.next_command()) is None:
                data = await stream.receive_some(1 << 18)
                if not data:
                    return
                buffer.receive_data(bytes(data))
            if command.is_response:
                return

    async with trio.open_nursery() as nursery:
        for stream, frame in zip(streams, frames, strict=True):
            nursery.start_soon(talk, stream, frame)
    print(f"{(time.perf_counter() - begin) * 1000:.0f}")
    await trio.sleep(0.5)  # notices that follow are measured, too


async def bench(names: list[str], limit_ms: float, groups: int) -> int:
    remoting, nameserver = (
        RemotingPlugin(RemotingConfig(listen="127.0.0.1:0")),
        NameServerPlugin(NameServerConfig(listen="127.0.0.1:0")),
    )
    addresses: dict[str, str] = {}
    clock = ManualClock(FIRST_MS)

    def ports(broker: Broker) -> list[Protocol]:
        broker.capabilities |= nameserver.martlet_capabilities(broker)
        return [*nameserver.martlet_protocols(broker), *remoting.martlet_protocols(broker)]

    with tempfile.TemporaryDirectory(prefix="martlet-pauses-") as folder:
        store = StoreConfig(flush="async", index_slots=100_000, index_entries=1_000_000)
        async with serving(Path(folder), store=store, clock=clock, ports=ports) as running:
            start(running, remoting, nameserver)
            fill(running.broker, clock, groups)
            await trio.sleep(1)
            for name, protocol in (("remoting", remoting.addresses), ("nameserver", {})):
                addresses[name] = protocol.get(name, "") or str(nameserver.server and nameserver.server.address)
            await saving._try_to_save(running.broker, offsets=True)
            await running.broker.store.upkeep.checkpointer.checkpoint()
            OldObjects().start()  # as `martlet run` does at its start
            print(f"{'request':34}  longest   second  garbage     real   answer   memory")
            found = {name: await measure(name, addresses) for name in names if name != SAVE}
            if SAVE in names:
                found[SAVE] = await measure_save(running.broker)
    late = [name for name, probe in found.items() if max(probe.pauses, default=0) * 1000 > limit_ms]
    print(f"over {limit_ms:g} ms: {', '.join(late) or 'none'}")
    return 1 if late else 0


def start(running: Serving, *plugins: RemotingPlugin | NameServerPlugin) -> None:
    """Start what runs beside the ports."""
    running.nursery.start_soon(saving.run, running.broker)
    for plugin in plugins:
        for service in plugin.martlet_services(running.broker):
            running.nursery.start_soon(service)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join([*REQUESTS, SAVE])
    parser.add_argument("requests", nargs="*", metavar="REQUEST", help=f"of: {known}; all without")
    parser.add_argument("--limit-ms", type=float, default=10.0, help="say which requests pause the loop for longer")
    parser.add_argument("--groups", type=int, default=GROUPS, help="consumer groups, each with offsets of 8 queues")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        trio.run(send, options.send, options.to)
        return 0
    random.seed(0)
    known = [*REQUESTS, SAVE]
    names = options.requests or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"request {unknown[0]!r} is unknown; known: {', '.join(known)}")
    return trio.run(bench, names, options.limit_ms, options.groups)


if __name__ == "__main__":
    sys.exit(main())
