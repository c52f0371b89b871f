"""Connection states of other brokers' bridges, published under ``$SYS/broker/connection/NAME/state``.

A bridge of Mosquitto publishes 1 under its name, retained, and has 0 as its will. As in Mosquitto, these states last
until the broker stops: they are not in the log, and subscribers get them like the broker's metrics (`sys_topics.py`).
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
# Beyond this the state with the oldest publication is dropped.
STATES_MAX: Final = 1000


def is_state(topic: str) -> bool:
    """Return whether *topic* is the name of a bridge's state."""
    return topic.startswith(PREFIX) and topic.endswith(SUFFIX) and len(topic) > len(PREFIX) + len(SUFFIX)


def state_name(topic: str, bytes_max: int) -> str:
    """Return *topic*, a state's name, once checked. Raises `NotAccepted` if too long, and `MqttError` if invalid."""
    if len(topic.encode()) > bytes_max:
        text = f"topic name {topic[:80]!r} has more than {bytes_max} bytes; mqtt.name_bytes_max is that"
        raise NotAccepted(text, ReasonCode.TOPIC_NAME_INVALID)
    check_name(topic)
    return topic


def check_state(topic: str, payload: bytes) -> None:
    """Raise `NotAccepted` if *payload* is too long for the state *topic*."""
    if len(payload) > STATE_BYTES_MAX:
        text = f"the state {topic[:80]!r} has {len(payload)} bytes; at most {STATE_BYTES_MAX} are accepted"
        raise NotAccepted(text, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR)


class News(NamedTuple):
    """A state not yet sent to subscribers: its publisher's client identifier, and its number among all states."""

    payload: bytes
    publisher: str
    number: int


@final
class Bridges:
    """Retained states by name, and news: states not yet sent to subscribers."""

    def __init__(self) -> None:
        self.published = 0  # number of states published since the start
        self._states: dict[str, bytes] = {}
        self._news: dict[str, News] = {}
        self._woken = trio.Event()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        """Yield the names and values of the retained states."""
        return iter(self._states.items())

    def publish(self, gate: Gate, client_id: str, topic: str, payload: bytes, *, retain: bool) -> None:
        """Publish *payload* of *client_id* as the state *topic*; with *retain*, an empty payload removes the state.

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
        """Wait for news; return the states published since the last call, at least one, by name."""
        if not self._news:
            self._woken = trio.Event()
            await self._woken.wait()
        news, self._news = self._news, {}
        return news
