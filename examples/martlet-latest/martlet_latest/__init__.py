"""A plugin with state: the newest message of each key, computed from the log and kept for longer than retention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import msgpack  # type: ignore[import-untyped]

from martlet.broker import Broker
from martlet.config import setting
from martlet.contracts import RecordView
from martlet.errors import StoreError
from martlet.message import Message, Record
from martlet.plugins.hooks import Hooks
from martlet.state import NOTHING, Projection
from martlet.store.codec import decode_record
from martlet.turns import Steps

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class LatestConfig:
    topics: list[str] = setting([], "topics of which the newest message of each tag is kept")


class Latest:
    """Where the newest message of each key is in the log; positions, never copies."""

    name = "latest"

    def __init__(self, broker: Broker, topics: Sequence[str]) -> None:
        self.topics = frozenset(topics)
        self._broker = broker
        self._positions: dict[tuple[str, str], int] = {}

    def read(self, topic: str, key: str) -> Record | None:
        """Return the newest message of *key* in *topic*, None if there is none."""
        position = self._positions.get((topic, key), -1)
        data = self._broker.store.record_at(position) if position >= 0 else None
        return decode_record(data) if data is not None else None

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            key = record.topic, record.property("TAGS") or ""
            if record.body:
                self._positions[key] = record.position
            else:
                self._positions.pop(key, None)

    def freeze(self) -> Callable[[], bytes]:
        positions = self._positions.copy()
        return lambda: bytes(msgpack.packb([FORMAT, [(*key, at) for key, at in positions.items()]]))

    def restore(self, data: bytes, first_position: int) -> None:
        version, rows = msgpack.unpackb(data) if data else (FORMAT, [])
        if version != FORMAT:
            raise StoreError(f"format {version} is unknown; expected {FORMAT}")
        self._positions = {(topic, key): at for topic, key, at in rows if at >= first_position}

    def forget(self, topic: str) -> None:
        self._positions = {key: at for key, at in self._positions.items() if key[0] != topic}

    def floor(self) -> int:
        return min(self._positions.values(), default=NOTHING)

    def roll(self, start: int, end: int) -> Steps[None]:
        for (topic, key), position in list(self._positions.items()):
            if start <= position < end and self._positions.get((topic, key)) == position:
                record = self.read(topic, key)
                if record is not None:
                    message = Message(topic, record.body, record.properties, record.queue_id, record.flag)
                    message.born_ms, message.born_host = record.born_ms, record.born_host
                    self._broker.publish(message)
            yield


class LatestPlugin(Hooks):
    config_class: ClassVar[type | None] = LatestConfig

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        self.latest = Latest(broker, self.config.topics)
        return (self.latest,)

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        return {Latest: self.latest}
