"""States that bridges of other brokers publish about their connections, under ``$SYS/broker/connection/NAME/state``.

A bridge of Mosquitto publishes 1 there, retained, and has 0 as its will. As in Mosquitto these messages are state of
this run of the broker: they are in no log, and sent like its metrics (`sys_topics.py`) to those who subscribe to them.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, final

import trio

from martlet.access import Gate
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.errors import NotAccepted
from martlet_mqtt.wire.names import check_name

__all__ = ["Bridges", "News", "check_state", "is_state", "state_name"]

PREFIX: Final = "$SYS/broker/connection/"
SUFFIX: Final = "/state"
# Mosquitto's bridges send one byte.
STATE_BYTES_MAX: Final = 256
# The state that was published longest ago makes room for another one.
STATES_MAX: Final = 1000


def is_state(topic: str) -> bool:
    """Return whether *topic* is the name of the state of a bridge."""
    return topic.startswith(PREFIX) and topic.endswith(SUFFIX) and len(topic) > len(PREFIX) + len(SUFFIX)


def state_name(topic: str, bytes_max: int) -> str:
    """Return *topic*, the name of a state. Raises `NotAccepted` and `MqttError` if it is no allowed name."""
    if len(topic.encode()) > bytes_max:
        text = f"topic name {topic[:80]!r} has more than {bytes_max} bytes; mqtt.name_bytes_max is that"
        raise NotAccepted(text, ReasonCode.TOPIC_NAME_INVALID)
    check_name(topic)
    return topic


def check_state(topic: str, payload: bytes) -> None:
    """Raise `NotAccepted` unless *payload* can be the state *topic*."""
    if len(payload) > STATE_BYTES_MAX:
        text = f"the state {topic[:80]!r} has {len(payload)} bytes; at most {STATE_BYTES_MAX} are accepted"
        raise NotAccepted(text, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR)


class News(NamedTuple):
    """A state that client *publisher* published as the *number*-th of all."""

    payload: bytes
    publisher: str
    number: int


@final
class Bridges:
    """The states that are retained, and those that subscribers have not got yet."""

    def __init__(self) -> None:
        self.published = 0  # states so far
        self._states: dict[str, bytes] = {}
        self._news: dict[str, News] = {}
        self._woken = trio.Event()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """Yield the names and values of the retained states."""
        return iter(self._states.items())

    def publish(self, gate: Gate, client_id: str, topic: str, payload: bytes, *, retain: bool) -> None:
        """Publish *payload* of a client as the state *topic*; an empty one that is retained removes it.

        Raises:
          Refused: the client of *gate* may not publish it.
          NotAccepted: the payload is too long.
        """
        gate.check("publish", topic)
        check_state(topic, payload)
        if retain:
            self._states.pop(topic, None)
            if payload:
                self._states[topic] = payload
            if len(self._states) > STATES_MAX:
                del self._states[next(iter(self._states))]
        self.published += 1
        if topic in self._news or len(self._news) < STATES_MAX:
            self._news[topic] = News(payload, client_id, self.published)
        self._woken.set()

    async def wait_news(self) -> dict[str, News]:
        """Return the states that were published since the last call, at least one, by their names."""
        if not self._news:
            self._woken = trio.Event()
            await self._woken.wait()
        news, self._news = self._news, {}
        return news
