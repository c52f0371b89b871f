"""What the gate costs in processor time, for a message that is published and for a pull.

    python benchmarks/gate.py [--rounds 25]

Calls the gate over a broker that does nothing, and that broker directly, by turns. Prints the least difference of all
rounds in microseconds: without authorizers, with one that allows everything, and in a topic where the authorizer is
asked about the name of each message; with the quotas of a user and of a group that are never used up, and with a plugin
that has none for this user.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from martlet.access import Gate
from martlet.broker import Broker
from martlet.contracts import Identity, Quota
from martlet.message import Message
from martlet.store import StoreConfig
from martlet.store.append.items import AppendItem
from martlet.testing.peers import RecordingPeer, serving

AT_ONCE = 40
TIMES = 500
NAMED = "named"
QUOTAS = tuple(Quota(group, 10**9, 10**12, 10**9, 10**12) for group in ("", "group"))


def allow(identity: Identity, action: str, name: str) -> bool:
    return True


def idle(broker: Broker) -> Any:
    """Return a broker for gates that does nothing with messages."""
    nothing: dict[str, Callable[..., object]] = {
        name: lambda *arguments, **options: None for name in ("publish", "publish_all")
    }
    parts = {name: getattr(broker, name) for name in ("store", "topics", "groups", "routers")}
    return SimpleNamespace(**nothing, **parts, find_queue=broker.find_queue)


def forms(broker: Broker) -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """By name the call through the gate, that without it, and how many messages or pulls that is."""
    behind, somebody = idle(broker), Identity("somebody")
    allowance = broker.quotas.admit(somebody, RecordingPeer())
    gate = Gate(behind, broker.rules.of(somebody), allowance)
    found: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {}
    for topic in ("plain", NAMED):
        properties = [f"UNIQ_KEY\x010123456789\x02TAGS\x01site/{n % 8}\x02".encode() for n in range(AT_ONCE)]
        messages = [Message(topic, b"x", each, 0) for each in properties]
        queue = broker.topics.ensure(topic, 1).queue(0)
        items: list[AppendItem] = [(queue, b"x", each, 0, 0, 0, 0, bytes(8), 0, 0) for each in properties]
        one = messages[0]
        kind = "" if topic == "plain" else ", asked by name"
        found[f"publish{kind}"] = (lambda one=one: gate.publish(one), lambda one=one: behind.publish(one), 1)
        found[f"publish_all of {AT_ONCE} messages{kind}"] = (
            lambda messages=messages: gate.publish_all(messages),
            lambda messages=messages: behind.publish_all(messages),
            AT_ONCE,
        )
        found[f"publish_all of {AT_ONCE} tuples{kind}"] = (
            lambda items=items: gate.publish_all(items),
            lambda items=items: behind.publish_all(items),
            AT_ONCE,
        )
    found["consume (a pull)"] = (lambda: gate.consume("group", "plain"), lambda: None, 1)
    delivered = (lambda: (allowance.room(32, 1 << 18), allowance.charge_out(1, 1))), (lambda: None), 1
    found["deliver a batch"] = delivered
    return found


def spent(work: Callable[[], object]) -> float:
    began = time.process_time()
    for _ in range(TIMES):
        work()
    return (time.process_time() - began) * 1e6 / TIMES


def measured(broker: Broker, rounds: int) -> dict[str, float]:
    """Microseconds a message or pull."""
    found = forms(broker)
    through, direct = dict.fromkeys(found, 1e9), dict.fromkeys(found, 1e9)
    for _ in range(rounds):
        gc.collect()
        for name, (gated, free, count) in found.items():
            through[name] = min(through[name], spent(gated) / count)
            direct[name] = min(direct[name], spent(free) / count)
    return {name: through[name] - direct[name] for name in found}


async def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="martlet-bench-") as directory:
        store = StoreConfig(flush="async", disk_full_ratio=1.0)
        async with serving(Path(directory), store=store) as running:
            broker = running.broker
            broker.topics.ensure(NAMED, 1)
            broker.cursors.open([NAMED])
            without = measured(broker, rounds)
            broker.quotas.sources = (lambda identity: QUOTAS,)
            with_two = measured(broker, rounds)
            broker.quotas.sources = (lambda identity: (),)
            with_none = measured(broker, rounds)
            broker.quotas.sources = ()
            broker.authorizers = (allow,)
            with_one = measured(broker, rounds)
    heads = "with an authorizer  with two quotas  with no quota"
    print(f"{'us a message or pull':<40} {'without':>8} {heads}")
    for name, each in without.items():
        print(f"{name:<40} {each:>8.2f} {with_one[name]:>18.2f} {with_two[name]:>16.2f} {with_none[name]:>14.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="rounds of each form; the least counts")
    trio.run(main, parser.parse_args().rounds)
