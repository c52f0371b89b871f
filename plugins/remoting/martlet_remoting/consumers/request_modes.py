"""Request modes: pull or pop, by topic and group, for consumers that let the broker allocate the queues.

RocketMQ MessageRequestModeManager; its file ``config/messageRequestMode.json`` has the same form here.
"""

from collections.abc import Iterator
from typing import Final, final

from msgspec import Struct

from martlet.errors import Reason, Refused
from martlet.runtime.steps import Steps
from martlet.tables.groups import Groups
from martlet.tables.rocketmq_json import parse, reading, render_in_steps, table_in
from martlet.tables.saved import NO_POSITION, POSITION_KEY, Table
from martlet.tables.topics import RETRY_PREFIX, Topic, Topics

__all__ = ["MODES", "POP", "PULL", "RequestMode", "RequestModes"]

PULL: Final = "PULL"
POP: Final = "POP"
MODES: Final = (PULL, POP)
NAME: Final = "messageRequestModeMap"
# Pairs of a topic and a group, 300 B each.
MODES_MAX: Final = 100_000
# The queue id that means all queues of a broker.
ALL_QUEUES: Final = -1


@final
class RequestMode(Struct, frozen=True):
    """The mode; with POP each consumer pops its own queues and the queues of *shared* others; 0 or less means all."""

    mode: str = PULL
    shared: int = ALL_QUEUES


@final
class RequestModes:
    """The modes that administrators have set, and the default mode."""

    def __init__(self, topics: Topics, groups: Groups, default: str) -> None:
        self._topics = topics
        self._groups = groups
        self._default = RequestMode(default)
        self._modes: dict[str, dict[str, RequestMode]] = {}
        self.table = Table("config/messageRequestMode.json", self.json_in_steps, self.load, urgent=True)
        topics.changed.append(self._topic_changed)
        groups.changed.append(self._group_changed)

    def get(self, topic: str, group: str) -> RequestMode:
        """Return the mode of *group* for *topic*; a retry topic is pulled unless its mode was set."""
        found = self._modes.get(topic, {}).get(group)
        if found is not None:
            return found
        return RequestMode() if topic.startswith(RETRY_PREFIX) else self._default

    def set(self, topic: str, group: str, mode: RequestMode) -> None:
        """Set the mode of *group* for *topic*. Raises `Refused` (BUSY) if there are too many."""
        groups = self._modes.get(topic, {})
        count = sum(map(len, self._modes.values()))
        if group not in groups and count >= MODES_MAX:
            text = f"{count} request modes are set, the most a broker keeps; delete unused groups or topics"
            raise Refused(Reason.BUSY, text)
        self._modes[topic] = {**groups, group: mode}
        self.table.change()

    def _topic_changed(self, topic: Topic | None) -> None:
        if topic is None:  # a topic was deleted
            for name in [name for name in self._modes if self._topics.get(name) is None]:
                del self._modes[name]
                self.table.change(removed=True)

    def _group_changed(self, group: str) -> None:
        if self._groups.get(group) is None:
            for topic, groups in [(topic, groups) for topic, groups in self._modes.items() if group in groups]:
                self._modes[topic] = {name: mode for name, mode in groups.items() if name != group}
                self.table.change(removed=True)

    def json_in_steps(self, position: int = NO_POSITION) -> Steps[list[bytes]]:
        """Return RocketMQ's JSON, with *position* if given."""
        fields = {} if position == NO_POSITION else {POSITION_KEY: position}
        return render_in_steps(fields, NAME, self._entries())

    def _entries(self) -> Iterator[tuple[str, object]]:
        for topic, groups in list(self._modes.items()):
            yield (
                topic,
                {
                    group: {"consumerGroup": group, "mode": mode.mode, "popShareQueueNum": mode.shared, "topic": topic}
                    for group, mode in groups.items()
                },
            )

    def load(self, data: bytes) -> None:
        """Load a ``config/messageRequestMode.json``. Raises `StoreError`, and changes nothing, if it is invalid."""
        table = parse(data, "messageRequestMode.json")
        topics = table_in(table, NAME, "messageRequestMode.json").items()
        with reading("messageRequestMode.json"):
            self._modes = {
                topic: {
                    group: RequestMode(POP if mode.get("mode") == POP else PULL, int(mode.get("popShareQueueNum", 0)))
                    for group, mode in groups.items()
                }
                for topic, groups in topics
            }
