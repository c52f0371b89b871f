"""A plugin with state: the newest message of each key, computed from the log and kept for longer than retention."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from martlet.broker import Broker
from martlet.config import Settings, setting
from martlet.contracts import RecordView
from martlet.message import Message, Record
from martlet.plugins.hooks import Hooks
from martlet.records.codec import decode_record
from martlet.runtime.steps import Budget, Steps
from martlet.state import NOTHING, Pages, Projection, pack_rows, unpack_rows

FORMAT: Final = 2


class LatestConfig(Settings):
    topics: list[str] = setting([], "topics of which the newest message of each tag is kept")


class Latest:
    """The log position of the newest message of each key; never copies of messages."""

    name = "latest"

    def __init__(self, broker: Broker, topics: Sequence[str]) -> None:
        self.topics = frozenset(topics)
        self._broker = broker
        self._positions: dict[str, Pages[str, int]] = {topic: Pages() for topic in topics}  # topic -> key -> position

    def read(self, topic: str, key: str) -> Record | None:
        """Return the newest message of *key* in *topic*, None if there is none."""
        position = self._positions[topic].get(key, -1) if topic in self._positions else -1
        data = self._broker.store.lookup.record_at(position) if position >= 0 else None
        return decode_record(data) if data is not None else None

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            positions, key = self._positions[record.topic], record.property("TAGS") or ""
            if record.body:
                positions[key] = record.position
            elif key in positions:
                del positions[key]

    def freeze(self) -> Steps[Sequence[bytes]]:
        tables = [(topic, positions.freeze()) for topic, positions in self._positions.items()]
        return pack_rows(FORMAT, ((topic, key, at) for topic, positions in tables for key, at in positions))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._positions = {topic: Pages() for topic in self.topics}
        budget = Budget()
        for topic, key, at in unpack_rows(FORMAT, data):
            if at >= first_position:
                self._positions[topic][key] = at
            if budget.is_over():
                yield

    def forget(self, topic: str) -> None:
        self._positions[topic] = Pages()

    def floor(self) -> int:
        return min((at for positions in self._positions.values() for at in positions.values()), default=NOTHING)

    def roll(self, start: int, end: int) -> Steps[None]:
        needed = [(topic, *each) for topic, positions in self._positions.items() for each in positions.items()]
        for topic, key, position in needed:
            while start <= position < end and self._positions[topic].get(key) == position:
                if not self._broker.projections.may_have_newer(self, topic, key):
                    self._copy(topic, position)
                    break
                yield  # until that is applied: a copy would follow it in the log, and replace it
            yield

    def _copy(self, topic: str, position: int) -> None:
        data = self._broker.store.lookup.record_at(position)
        if data is not None:
            record = decode_record(data)
            message = Message(topic, record.body, record.properties, record.queue_id, record.flag, record.sys_flag)
            message.born_ms, message.born_host = record.born_ms, record.born_host
            self._broker.publish(message)


class LatestPlugin(Hooks):
    config_class: ClassVar[type[Settings] | None] = LatestConfig

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        self.latest = Latest(broker, self.config.topics)
        return {Latest: self.latest}

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        return (self.latest,)
