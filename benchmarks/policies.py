"""What access rules and quotas cost: loading them, the memory they take, decisions, and the quotas of a user.

    python benchmarks/policies.py [--users 10000] [--rules 100000] [--groups 500] [--quotas]
    python benchmarks/policies.py --pauses 9

Each user has the same number of rules and is in four groups, which have further ones; everybody has ten. With --quotas
each user and each group has one. Prints the time to decode and to check the document, the memory that is left
afterwards and at the most, and the processor time of decisions: the first one of each user, which prepares the rules,
further ones, and the first one after a change.

With ``--pauses`` a broker has the document, and so many times an edit of its file is read again, an edit with an error
is refused, and an administrator changes a rule. Prints what they take, and how late a timer of 1 ms of the event loop
was at the most meanwhile: the median of these times and the least. In between, the timer runs as long beside nothing:
other work on the machine makes it late as well.
"""

import argparse
import gc
import json
import logging
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import trio

from martlet.app import saving
from martlet.broker import Broker
from martlet.contracts import AccessRule, Identity, Question, Service
from martlet.runtime.gc_schedule import OldObjects
from martlet.runtime.steps import finish_now
from martlet.state import Projection
from martlet.store import StoreConfig
from martlet.store.disk.files import RealDisk, atomic_write
from martlet.testing.peers import serving
from martlet_acl.config import AclConfig
from martlet_acl.files import POLICIES, SECRETS
from martlet_acl.plugin import AclPlugin
from martlet_acl.policy.document import PolicyDocument, StoredPolicies, decode_document, fill_policies
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import Policies
from martlet_acl.policy.quotas import StoredQuota
from martlet_acl.policy.rules import StoredRule, parse_rule

TICK_S = 0.001
NETWORKS = tuple(f"10.{number}.0.0/16" for number in range(200))


def make_rule(number: int, chance: random.Random) -> StoredRule:
    """Return a rule about one of a thousand topics, groups or names, or about many of them."""
    place = chance.randrange(1000)
    resource = (
        f"topic:orders_{number}_{place}",
        f"topic:orders_{number}*",
        f"group:billing_{number}_{place}",
        f"name:mqtt/site_{number}/+/{place}/temperature",
        f"name:mqtt/site_{number}_{place}/#",
        f"name:mqtt/home_{number}/room_{place}/door",
        f"name:mqtt/site_{number}_{place}/room*",
        f"shared:mqtt/group_{number}_{place}",
        f"topic:%RETRY%billing_{number}_{place}",
        f"topic:{number}_{place}_{{user}}" if number % 10 == 0 else f"topic:{number}_{place}_results",
    )[number % 10]
    actions = chance.choice((("publish",), ("subscribe",), ("publish", "subscribe"), ("get", "list"), ("all",)))
    networks = tuple(chance.sample(NETWORKS, 2)) if chance.random() < 0.1 else ()
    return StoredRule(resource, actions, chance.choice(("allow", "allow", "allow", "deny")), networks)


def make_document(users: int, groups: int, rules: int, *, quotas: bool) -> bytes:
    chance = random.Random(1)
    names = [f"g{number}" for number in range(groups)]
    nesting = {name: (f"g{number // 2}",) for number, name in enumerate(names) if groups // 2 <= number}
    of_groups = rules // 10
    of_users = -((of_groups + 10 - rules) // users)
    stored = {f"user:u{user}": several(user * of_users, of_users, chance) for user in range(users)}
    stored |= {
        f"group:{name}": several(number * 1000, of_groups // groups, chance) for number, name in enumerate(names)
    }
    stored["everybody"] = several(0, 10, chance)
    records = {f"u{user}": UserRecord(tuple(chance.sample(names, min(4, groups)))) for user in range(users)}
    limited = [*(f"user:u{user}" for user in range(users)), *(f"group:{name}" for name in names)] if quotas else []
    limits = {subject: StoredQuota(chance.randrange(1, 10**6), connections=10) for subject in limited}
    return msgspec.json.encode(PolicyDocument(records, nesting, stored, quotas=limits))


def several(first: int, count: int, chance: random.Random) -> StoredPolicies:
    rules = {rule.resource: rule for rule in (make_rule(first + number, chance) for number in range(count))}
    custom = tuple(rules.values())
    return StoredPolicies(custom[: -count // 5], custom[-count // 5 :])


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def timed(work: Callable[[], object]) -> float:
    """Return the microseconds of processor time that *work* takes."""
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1000


def show(what: str, times: Sequence[float]) -> None:
    ordered = sorted(times)
    late = ordered[len(ordered) * 99 // 100]
    print(f"{what:<34} median {statistics.median(ordered):7.1f} us, 99 % {late:7.1f} us, most {ordered[-1]:7.1f} us")


def questions(users: int, kind: str, names: Sequence[str]) -> list[Question]:
    chance = random.Random(2)
    action = chance.choice(("publish", "subscribe"))
    return [
        Question(Identity(f"u{user}"), action, kind, chance.choice(names), "10.7.1.1")  # type: ignore[arg-type]
        for user in range(users)
    ]


def measure_decisions(policies: Policies, users: int) -> None:
    topics = questions(users, "topic", [f"orders_{number}_7" for number in range(1000)])
    filters = questions(users, "name", [f"mqtt/site_{number}/a/7/temperature" for number in range(1000)])
    show("first decision of a user", [timed(lambda q=q: policies.decide(q)) for q in topics])  # type: ignore[misc]
    show("further one, on a topic", [timed(lambda q=q: policies.decide(q)) for q in topics])  # type: ignore[misc]
    show("the quotas of a user", [timed(lambda q=q: policies.quotas_of(q.identity)) for q in topics])  # type: ignore[misc]
    show("further one, on a name", [timed(lambda q=q: policies.decide(q)) for q in filters])  # type: ignore[misc]
    rule = parse_rule(StoredRule("name:mqtt/changed/+/state", ("publish",), "allow"))
    changes, afterwards = [], []
    for question in topics:
        subject = f"user:{question.identity.name}"
        changes.append(timed(lambda subject=subject: policies.put_rule(subject, "custom", rule)))  # type: ignore[misc]
        afterwards.append(timed(lambda q=question: policies.decide(q)))  # type: ignore[misc]
    show("change of a rule", changes)
    show("decision after it", afterwards)
    changes = [timed(lambda: policies.put_group("g0", ["top"])) for _ in range(100)]
    show("change of a group", changes)


class Timer:
    """A timer of the event loop; ``late_s`` is how late it was at the most."""

    def __init__(self) -> None:
        self.late_s = 0.0

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await trio.sleep(TICK_S)
            self.late_s = max(self.late_s, time.perf_counter() - due)


@asynccontextmanager
async def acl_broker(directory: Path) -> AsyncIterator[AclPlugin]:
    plugin = AclPlugin(AclConfig(watch_s=0))

    def projections(broker: Broker) -> Sequence[Projection]:
        plugin.martlet_capabilities(broker)
        return ()

    def services(broker: Broker) -> Sequence[Service]:
        return [partial(saving.run, broker)]

    async with serving(
        directory, store=StoreConfig(flush="async"), projections=projections, services=services
    ) as running:
        OldObjects().start()
        while running.broker.saver is None:
            await trio.lowlevel.checkpoint()
        yield plugin


async def measure_pauses(data: bytes, users: int, repeats: int) -> None:
    document = msgspec.json.decode(data)
    key = {"keys": {"{}": {"secret": "a secret of twenty bytes"}}}
    secrets = {name: json.loads(json.dumps(key).replace("{}", name)) for name in document["users"]}
    with tempfile.TemporaryDirectory(prefix="martlet-policies-") as folder:
        policies_file, secrets_file = (Path(folder, file) for file in (POLICIES, SECRETS))
        policies_file.parent.mkdir()
        policies_file.write_bytes(data)
        secrets_file.touch(0o600)
        secrets_file.write_bytes(msgspec.json.encode({"users": secrets}))
        async with acl_broker(Path(folder)) as plugin:
            lines = []

            async def reload(content: bytes) -> None:
                for user in range(users):  # so that there is something to forget
                    plugin.state().policies.decide(Question(Identity(f"u{user}"), "get", "topic", "a", ""))
                await trio.to_thread.run_sync(atomic_write, RealDisk(), str(policies_file), content)
                lines.append(await timed_pause(plugin.saved.reload))

            for number in range(repeats):
                rule = AccessRule(f"topic:changed{number}", ("get",), "allow")
                put = partial(plugin.administration.put_rules, f"user:u{number}", "custom", [rule], None)
                lines.append(await timed_pause(put))
                content = policies_file.read_bytes()
                await reload(content[:-3])
                await reload(content + b"\n")
                lines.append(await timed_pause(partial(trio.sleep, lines[-1][0])))
                assert len(plugin.state().policies) > number
    for number, what in enumerate(("a changed rule", "an edit with an error", "an edit", "nothing")):
        times, pauses = zip(*lines[number::4], strict=True)
        shown = f"{statistics.median(pauses) * 1000:6.1f} ms, least {min(pauses) * 1000:6.1f} ms"
        print(f"{what:<24}{statistics.median(times):6.2f} s, late by {shown}")


async def timed_pause(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Return what *work* takes, and how late the timer was, in seconds."""
    timer = Timer()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        await trio.sleep(0.05)
        timer.late_s = 0.0
        began = time.perf_counter()
        await work()
        elapsed = time.perf_counter() - began
        nursery.cancel_scope.cancel()
    return elapsed, timer.late_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--rules", type=int, default=100_000)
    parser.add_argument("--quotas", action="store_true")
    parser.add_argument("--pauses", type=int, default=0)
    options = parser.parse_args()
    data = make_document(options.users, options.groups, options.rules, quotas=options.quotas)
    if options.pauses:
        logging.disable(logging.ERROR)
        trio.run(measure_pauses, data, options.users, options.pauses)
        return
    gc.collect()
    gc.disable()  # as at the start of a broker
    resident = resident_mib()
    began = time.perf_counter()
    document = finish_now(decode_document(data))
    decoded = time.perf_counter()
    policies = finish_now(fill_policies(document))
    filled = time.perf_counter()
    del document
    OldObjects().start()
    gc.enable()
    loaded = f"{len(policies)} rules and {len(policies.quotas)} quotas in {len(data) / (1 << 20):.1f} MiB"
    print(f"{loaded}: {filled - began:.2f} s", end="")
    print(f" (decoded in {decoded - began:.2f} s), {resident_mib() - resident:.0f} MiB resident")
    measure_decisions(policies, options.users)
    print(f"after all of them: {resident_mib() - resident:.0f} MiB resident")
    tracemalloc.start()
    policies = finish_now(fill_policies(finish_now(decode_document(data))))
    held, most = tracemalloc.get_traced_memory()
    print(f"loading once more: {held / (1 << 20):.0f} MiB held, {most / (1 << 20):.0f} MiB at the most")


if __name__ == "__main__":
    main()
