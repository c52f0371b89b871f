"""Retained messages: the log position of the newest one of each name.

A retained message is stored twice, in one atomic group: in its topic, where everybody receives it once, and in
`RETAINED_TOPIC`, which no client can read. A projection of that topic alone knows the newest record of each name, so it
costs nothing for other messages, and retention copies records there without anybody receiving them again.
An empty payload removes the retained message of its name (MQTT 5 section 3.3.1.3).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, final

from martlet.contracts import RecordView
from martlet.message import Message
from martlet.records.codec import decode_record
from martlet.state import NOTHING, Pages, pack_rows, unpack_rows
from martlet.steps import Pace, Steps, WaitingSteps, off_loop
from martlet.store import Store
from martlet.store.notes import OWN_PREFIX

from .names import HIDDEN

__all__ = ["RETAINED_TOPIC", "Retained"]

RETAINED_TOPIC: Final = OWN_PREFIX + "mqtt.retained"
FORMAT: Final = 1


class _Node(dict[str, "_Node"]):
    """The names below a level; ``is_name`` says whether the levels so far are a name."""

    __slots__ = ("is_name",)

    def __init__(self) -> None:
        super().__init__()
        self.is_name = False


@final
class Retained:
    """The projection (martlet.state.Projection): positions by name, and the levels of names for wildcards."""

    name = "mqtt-retained"
    topics = frozenset((RETAINED_TOPIC,))

    def __init__(self, store: Store) -> None:
        self._store = store
        self._positions: Pages[str, int] = Pages()
        self._root = _Node()

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, name: str) -> bool:
        return name in self._positions

    def position(self, name: str) -> int:
        """Return the log position of the retained message of *name*; -1 if there is none."""
        return self._positions.get(name, -1)

    def matches(self, topic_filter: str) -> Iterator[str]:
        """Yield the names with a retained message that *topic_filter* matches."""
        if "+" not in topic_filter and "#" not in topic_filter:
            if topic_filter in self._positions:
                yield topic_filter
            return
        yield from _below(self._root, topic_filter.split("/"), 0, [])

    # the projection

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            name = record.property("TAGS") or ""
            if record.body and record.property("MQTT_PAYLOAD_BYTES") != "0":
                if name not in self._positions:
                    self._add_levels(name)
                self._positions[name] = record.position
            elif name in self._positions:
                del self._positions[name]
                self._drop_levels(name)

    def _add_levels(self, name: str) -> None:
        node = self._root
        for level in name.split("/"):
            found = node.get(level)
            if found is None:
                found = node[level] = _Node()
            node = found
        node.is_name = True

    def _drop_levels(self, name: str) -> None:
        levels, path = name.split("/"), [self._root]
        for level in levels:
            path.append(path[-1][level])
        path[-1].is_name = False
        for depth in range(len(levels), 0, -1):
            if path[depth] or path[depth].is_name:
                return
            del path[depth - 1][levels[depth - 1]]

    def freeze(self) -> Steps[Sequence[bytes]]:
        positions = self._positions.freeze()
        return pack_rows(FORMAT, ((name, at) for name, at in positions))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._positions, self._root = Pages(), _Node()
        pace = Pace()
        for name, at in unpack_rows(FORMAT, data):
            if at >= first_position:
                self._positions[name] = at
                self._add_levels(name)
            if pace.is_over():
                yield

    def forget(self, topic: str) -> None:
        self._positions, self._root = Pages(), _Node()

    def floor(self) -> int:
        return min((at for _, at in self._positions.items()), default=NOTHING)

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        needed = [(name, at) for name, at in self._positions.items() if start <= at < end]
        for name, at in needed:
            if self._positions.get(name) != at:
                continue
            data = yield from off_loop(partial(self._store.known_record, at))
            if data is not None and self._positions.get(name) == at:
                record = decode_record(data)
                copy = Message(RETAINED_TOPIC, record.body, record.properties, 0, record.flag)
                copy.born_ms, copy.born_host = record.born_ms, record.born_host
                self._store.append(copy, 0)


def _below(node: _Node, levels: Sequence[str], depth: int, path: list[str]) -> Iterator[str]:
    """Yield the names below *node*, which is at *path*, that the levels of a filter from *depth* on match."""
    if depth == len(levels):
        if node.is_name:
            yield "/".join(path)
        return
    level = levels[depth]
    if level == "#":
        if node.is_name and path:
            yield "/".join(path)
        for each, child in node.items():
            if path or not each.startswith(HIDDEN):
                yield from _below(child, levels, depth, [*path, each])
    elif level == "+":
        for each, child in node.items():
            if path or not each.startswith(HIDDEN):
                yield from _below(child, levels, depth + 1, [*path, each])
    elif (found := node.get(level)) is not None:
        yield from _below(found, levels, depth + 1, [*path, level])
