"""Committed offsets of consumer groups, and pending resets.

They are stored in RocketMQ's consumerOffset.json, and shared by all protocols.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from martlet.errors import Reason, Refused
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Steps
from martlet.store.format.light import is_light
from martlet.tables.names import GROUPS_MAX, check_group_name
from martlet.tables.rocketmq_json import DataVersion, head_of, parse, reading, render_in_steps, table_in
from martlet.tables.saved import NO_POSITION, POSITION_KEY, Table

__all__ = ["OFFSETS_MAX", "CommittedOffsets"]

FOREIGN_POPS_KEY: Final = "martletForeignPops"
OFFSETS_MAX: Final = 500_000  # the default of broker.offsets_max


class CommittedOffsets:
    """The committed offsets of all groups, and pending offset resets; *knows* says whether there is a group."""

    def __init__(self, clock: Clock, offsets_max: int, knows: Callable[[str], bool]) -> None:
        self._offsets_max = offsets_max
        self._knows = knows
        # group -> topic -> queue id -> next offset to consume
        self._offsets: dict[str, dict[str, dict[int, int]]] = {}
        self.count = 0
        # topic -> group -> queue id -> offset
        self._resets: dict[str, dict[str, dict[int, int]]] = {}
        self.version = DataVersion(timestamp=clock.now_ms())
        self.table = Table("config/consumerOffset.json", self.json_in_steps, self.load)
        # With light queues on, RocketMQ uses this file instead of the other. It is written if light queues are on here,
        # or if it existed before.
        self.light_table = Table("config/lmqConsumerOffset.json", self.light_json_in_steps, self.load_light)
        self.keeps_light = False
        # The loaded offsets include all notes of offsets before this log position, or newer offsets.
        self.position = 0
        # RocketMQ wrote the offsets last, and nobody has taken over its pops yet; the file says so until then.
        self.has_foreign_pops = False
        self.was_reset: list[Callable[[str, str], None]] = []  # called with group and topic

    def get(self, group: str, topic: str, queue_id: int) -> int:
        """Return the committed offset of *group* in that queue; -1 if there is none."""
        return self.committed(group, topic).get(queue_id, -1)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Commit *offset*: *group* has consumed everything below it; a lower offset than before is allowed.

        While a reset is pending for this queue, commits are ignored: they are from consumers before the reset.
        """
        if self._resets and self.pending_reset(group, topic, queue_id) >= 0:
            return
        try:
            table = self._offsets[group][topic]
        except KeyError:
            table = self._offsets.setdefault(group, {}).setdefault(topic, {})
        old_offset = table.get(queue_id)
        if old_offset != offset:
            self.count += old_offset is None
            table[queue_id] = offset
            self.note_changed()

    def note_changed(self) -> None:
        """Mark the offsets as changed, so that they are written."""
        self.table.change()
        if self.keeps_light:
            self.light_table.change()

    def check_may_commit(self, group: str, topic: str, queue_ids: Iterable[int]) -> None:
        """Raise `Refused` if committing offsets of *group* for these queues would exceed a limit."""
        table = self.committed(group, topic)
        new_count = sum(queue_id not in table for queue_id in queue_ids)
        if not new_count:
            return
        if self.count + new_count > self._offsets_max:
            text = f"{self.count} offsets are stored and {new_count} more requested; broker.offsets_max is"
            raise Refused(Reason.BUSY, f"{text} {self._offsets_max}, delete unused groups")
        if self._knows(group):
            return
        check_group_name(group)
        if group not in self._offsets and len(self._offsets) >= GROUPS_MAX:
            text = f"there are offsets of {len(self._offsets)} groups, the most a broker keeps; delete some"
            raise Refused(Reason.BUSY, text)

    def topics_of(self, group: str) -> list[str]:
        """Return the topics with committed offsets of *group*."""
        return list(self._offsets.get(group, ()))

    def committed(self, group: str, topic: str) -> Mapping[int, int]:
        """Return the committed offsets of *group* in *topic*: queue id -> offset; do not change or keep it."""
        return self._offsets.get(group, {}).get(topic, {})

    def groups_of(self, topic: str) -> list[str]:
        """Return the groups with committed offsets in *topic*."""
        return [group for group, topics in self._offsets.items() if topic in topics]

    def reset(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Make the next pull of each queue start at its new offset (RocketMQ's server-side reset)."""
        resets = self._resets.setdefault(topic, {}).setdefault(group, {})
        table = self._offsets.setdefault(group, {}).setdefault(topic, {})
        for queue_id, offset in offsets.items():
            resets[queue_id] = offset
            self.count += queue_id not in table
            table[queue_id] = offset
        self.note_changed()
        for tell in self.was_reset:
            tell(group, topic)

    def pending_reset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the offset of the pending reset; -1 if there is none."""
        groups = self._resets.get(topic)
        if groups is None:
            return -1
        return groups.get(group, {}).get(queue_id, -1)

    def has_resets(self, group: str, topic: str) -> bool:
        """Return whether a reset of *group* is pending in any queue of *topic*."""
        return bool(self._resets) and group in self._resets.get(topic, ())

    def take_reset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the offset of the pending reset like `pending_reset`, and clear it."""
        table = self._resets.get(topic, {}).get(group, {})
        offset = table.pop(queue_id, -1)
        if offset >= 0 and not table:
            self._drop_reset(topic, group)
        return offset

    def lower(self, end_of: Callable[[str, int], int]) -> int:
        """Lower each committed offset beyond *end_of* its topic and queue id; return the number lowered."""
        lowered = 0
        for topics in self._offsets.values():
            for topic, offsets in topics.items():
                for queue_id, offset in offsets.items():
                    end = end_of(topic, queue_id)
                    if offset > end:
                        offsets[queue_id] = end
                        lowered += 1
        if lowered:
            self.note_changed()
        return lowered

    def forget_group(self, group: str) -> None:
        """Drop the offsets of *group* in all topics."""
        topics = self._offsets.pop(group, {})
        self.count -= sum(map(len, topics.values()))
        for topic in topics:
            self._drop_reset(topic, group)
        self.note_changed()

    def forget_topic(self, topic: str) -> None:
        """Drop the offsets of all groups in *topic*."""
        for group in self.groups_of(topic):
            self._forget(group, topic)
        self._resets.pop(topic, None)
        self.note_changed()

    def forget(self, group: str, topic: str) -> None:
        """Drop the offsets of *group* in *topic*."""
        self._forget(group, topic)
        self._drop_reset(topic, group)
        self.note_changed()

    def _forget(self, group: str, topic: str) -> None:
        topics = self._offsets.get(group, {})
        self.count -= len(topics.pop(topic, ()))
        if not topics:
            self._offsets.pop(group, None)

    def _drop_reset(self, topic: str, group: str) -> None:
        groups = self._resets.get(topic)
        if groups is not None and groups.pop(group, None) is not None and not groups:
            del self._resets[topic]

    # files

    def json_in_steps(self, position: int = NO_POSITION) -> Steps[list[bytes]]:
        """Return the offsets as ``config/consumerOffset.json``, complete up to log position *position*, if known.

        The offsets of one group and topic are those at the time of their slice, which may run in a worker thread.
        """
        head = head_of(self.version, position)
        if self.has_foreign_pops:
            head[FOREIGN_POPS_KEY] = True
        return render_in_steps(head, "offsetTable", self._offsets_by_key(), bare_keys=True)

    def _offsets_by_key(self, *, light: bool | None = None) -> Iterator[tuple[str, Mapping[int, int]]]:
        """Yield each topic and group with offsets; tolerates changes in the meantime.

        *light* selects only groups named like light topics (True) or only the others (False).
        """
        for group in list(self._offsets):
            if light is not None and light is not is_light(group):
                continue
            topics = self._offsets.get(group, {})
            for topic in list(topics):
                if (offsets := topics.get(topic)) is not None:
                    yield f"{topic}@{group}", offsets

    def load(self, data: bytes) -> None:
        """Load a ``config/consumerOffset.json``. Raises `StoreError`, and changes nothing, if it is invalid."""
        table = parse(data, "consumerOffset.json")
        with reading("consumerOffset.json"):
            offsets = _offsets_in(table, "consumerOffset.json")
            position = int(table.get(POSITION_KEY, NO_POSITION))
        self.version.load(table.get("dataVersion"))
        self.position = position
        self.has_foreign_pops = table.get(FOREIGN_POPS_KEY) is True
        self._replace_offsets(offsets)

    def _replace_offsets(self, offsets: Mapping[tuple[str, str], dict[int, int]]) -> None:
        for (topic, group), table_of_queues in offsets.items():
            self._forget(group, topic)
            self._offsets.setdefault(group, {})[topic] = table_of_queues
            self.count += len(table_of_queues)

    def light_json_in_steps(self, position: int = NO_POSITION) -> Steps[list[bytes]]:
        """As `json_in_steps`, as ``config/lmqConsumerOffset.json``: light groups have a table of their own there."""
        head = head_of(self.version, position)
        light_groups, other_groups = self._offsets_by_key(light=True), self._offsets_by_key(light=False)

        def render() -> Steps[list[bytes]]:
            fields = {**head, "lmqOffsetTable": {key: offsets.get(0, 0) for key, offsets in light_groups}}
            return (yield from render_in_steps(fields, "offsetTable", other_groups, bare_keys=True))

        return render()

    def load_light(self, data: bytes) -> None:
        """Take over a ``config/lmqConsumerOffset.json``, after `load`, where RocketMQ wrote it last.

        Raises `StoreError`, and takes nothing, when it is not one.
        """
        table = parse(data, "lmqConsumerOffset.json")
        with reading("lmqConsumerOffset.json"):
            loaded = _offsets_in(table, "lmqConsumerOffset.json")
            for key, offset in (table.get("lmqOffsetTable") or {}).items():
                topic, _, group = key.rpartition("@")
                loaded[topic, group] = {0: int(offset)}
            is_own = POSITION_KEY in table
        self.keeps_light = True
        if is_own:
            return  # the other file was written with this one, or since
        if self.position == NO_POSITION:
            # RocketMQ wrote both, with light queues on and off; nothing shows which is newer.
            for (topic, group), offsets in loaded.items():
                for queue_id, offset in self.committed(group, topic).items():
                    offsets[queue_id] = max(offset, offsets.get(queue_id, 0))
        self.position = NO_POSITION
        self._replace_offsets(loaded)
        self.note_changed()


def _offsets_in(table: Mapping[str, Any], name: str) -> dict[tuple[str, str], dict[int, int]]:
    """Return the ``offsetTable`` of *table*, the content of file *name*, by topic and group."""
    offsets_by_key: dict[tuple[str, str], dict[int, int]] = {}
    for key, offsets in table_in(table, "offsetTable", name).items():
        topic, _, group = key.rpartition("@")
        offsets_by_key[topic, group] = {int(queue_id): int(offset) for queue_id, offset in offsets.items()}
    return offsets_by_key
