"""Whatever happens, in any order: each name keeps the newest message that was stored, and removals are final."""

from dataclasses import dataclass, field
from errno import ENOSPC
from pathlib import Path
from random import Random

import pytest
import trio
from tests.mqtt.retained_talk import append, applied, held, roll, run_now
from tests.wire_clients.mqtt import MqttBroker, mqtt_broker

from martlet.errors import Refused
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config

DATA = Path("/data")
SNAPSHOT = "/data/config/mqtt-retained.snapshot"
NAMES = "abcdef"
STEPS = 120
DERIVED = ("/data/consumequeue/", "/data/index/", "/data/checkpoint", "/data/queues.")
ENDS = (
    "stop",
    "kill",
    "kill",
    "stop without snapshot",
    "kill without snapshot",
    "stop with an older snapshot",
    "stop with a damaged snapshot",
    "stop without derived files",
    "kill without derived files",
    "kill without derived files and snapshot",
)


@dataclass
class Model:
    """What is stored, and what is appended but not committed; a message without payload removes."""

    chance: Random
    stored: dict[str, bytes] = field(default_factory=dict)
    pending: list[tuple[int, str, bytes]] = field(default_factory=list)  # each with its end in the log
    number: int = 0
    failed: int = 0
    removed: int = 0

    def settle(self, mqtt: MqttBroker) -> None:
        """Take what was committed, by a segment that ended, by retention or by the server."""
        while self.pending and self.pending[0][0] <= mqtt.broker.store.written:
            _, name, payload = self.pending.pop(0)
            self.stored.pop(name, None)
            if payload:
                self.stored[name] = payload

    def append(self, mqtt: MqttBroker) -> None:
        self.number += 1
        name = self.chance.choice(NAMES)
        # Of few sizes, so that messages of one name often have the same.
        payload = b"" if self.chance.random() < 0.3 else b"%05d" % self.number * self.chance.choice((1, 1, 40))
        append(mqtt, name, payload)
        self.pending.append((mqtt.broker.store.appended, name, payload))

    def fail(self, mqtt: MqttBroker, disk: FakeDisk) -> None:
        """Meet a full disk, and then space again."""
        self.settle(mqtt)
        if not self.pending:
            return
        disk.fail_next("write", ENOSPC)
        with pytest.raises(Refused):
            mqtt.broker.store.committer.commit()
        self.pending.clear()
        self.failed += 1
        mqtt.broker.store.upkeep.retention.look()

    async def retire(self, mqtt: MqttBroker, disk: FakeDisk) -> None:
        """Do what retention does, while messages are appended."""
        store = mqtt.broker.store
        before = store.first_position
        await applied(mqtt)
        if len(store.segments.items) < 2:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mqtt.broker.projections.keeper.release, store.segments.items[-2].end)
            for _ in range(self.chance.randrange(4)):
                await trio.lowlevel.checkpoint()
                self.append(mqtt)
        await store.upkeep.checkpointer.checkpoint()
        disk.used_ratio = 0.95
        store.upkeep.retention.look()
        disk.used_ratio = 0.1
        self.removed += store.first_position > before

    async def step(self, mqtt: MqttBroker, disk: FakeDisk) -> None:
        kind = self.chance.choice(
            ("append",) * 8 + ("fill", "fill", "write", "write", "fail", "apply", "roll", "retire")
        )
        if kind == "append":
            self.append(mqtt)
        elif kind == "fill":
            append(mqtt, "filler", bytes(3000), retain=False)
        elif kind == "write":
            mqtt.broker.store.committer.commit()
        elif kind == "fail":
            self.fail(mqtt, disk)
        elif kind == "apply":
            await applied(mqtt)
        elif kind == "roll":
            roll(mqtt, self.chance.choice((mqtt.broker.store.readable, mqtt.broker.store.written)))
        else:
            await self.retire(mqtt, disk)


def after(disk: FakeDisk, end: str) -> FakeDisk:
    """Return *disk* as it is found after *end*."""
    for path in [path for path in disk.files if path.startswith(SNAPSHOT)]:
        if end.endswith(("without snapshot", "and snapshot")) or ("older" in end and path == SNAPSHOT):
            disk.unlink(path)
        elif "damaged" in end and path == SNAPSHOT:
            fd = disk.open(path)
            disk.write(fd, b"\xff", 40)
            disk.close(fd)
    for path in [path for path in disk.files if path.startswith(DERIVED)] if "derived" in end else ():
        disk.unlink(path)
    return disk


def check_limits(mqtt: MqttBroker) -> None:
    """What is retained is counted exactly, also after messages were appended whose commit failed."""
    retained = mqtt.context.retained
    count, size = len(retained), retained.bytes
    retained.check_room("new", 1, count + 1, size + 1)
    for count_max, bytes_max in ((count, size + 1), (count + 1, size)):
        with pytest.raises(Refused):
            retained.check_room("new", 1, count_max, bytes_max)


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("seed", range(12))
async def test_each_name_keeps_its_newest_message(flush: str, seed: int) -> None:
    disk, model = FakeDisk(), Model(Random(f"{seed} {flush}"))
    store = small_config(
        flush=flush, segment_bytes=1 << 14, page_bytes=1 << 12, cache_bytes=1 << 16, disk_clean_ratio=0.9
    )
    for end in (*model.chance.sample(ENDS, 4), "stop"):
        async with mqtt_broker(DATA, store=store, disk=disk) as mqtt:
            await applied(mqtt)
            assert held(mqtt) == model.stored
            for _ in range(STEPS // 4):
                await model.step(mqtt, disk)
                if not model.chance.randrange(6):
                    run_now(mqtt.context.retained.sweep())
            if end.startswith("kill"):
                model.settle(mqtt)
                model.pending.clear()
                found = disk.after_power_cut(Cut.KILLED, model.chance)
            else:
                await applied(mqtt)
                model.settle(mqtt)
                assert held(mqtt) == model.stored
                check_limits(mqtt)
        disk = after(found if end.startswith("kill") else disk, end)
    assert model.failed or model.removed
