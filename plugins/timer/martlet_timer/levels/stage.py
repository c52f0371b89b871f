"""Delay levels: their table in RocketMQ's notation (``messageDelayLevel``), and the stage that holds messages."""

import re
from typing import TYPE_CHECKING, Final, final

from martlet.contracts import Stage
from martlet.errors import ConfigError, Reason, Refused
from martlet.message import Message, find_property, put_property, remove_property
from martlet.records.layout import TRANSACTION_MASK
from martlet.store.format.delays import SCHEDULE_TOPIC
from martlet.tables.topics import BROKER_TOPICS
from martlet_timer.levels.delay_clock import DelayClock
from martlet_timer.properties import LEVEL, REAL_QUEUE, REAL_TOPIC, SCHEDULE_KEYS, TIME_KEYS

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["LEVELS_MAX", "LevelStage", "parse_levels"]

# Each level is a queue, which each round of deliveries checks.
LEVELS_MAX: Final = 256
UNITS_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
# The longest delay is about 27 years.
_DELAY: Final = re.compile(r"(\d{1,4})([smhd])")
# Texts that Java's Integer.parseInt accepts.
_INTEGER: Final = re.compile(rb"[+-]?[0-9]{1,10}")
INTEGER_MAX: Final = (1 << 31) - 1
# The bits of sysFlag of a message whose transaction was committed.
COMMITTED: Final = 0x8


def parse_levels(text: str) -> tuple[int, ...]:
    """Return the delays in ms of *text*, such as ``1s 5s 2h``, from level 1 on.

    Raises:
      ConfigError: *text* is not a list of 1 to 256 delays.
    """
    words = text.split()
    if not 1 <= len(words) <= LEVELS_MAX:
        raise ConfigError(f"timer.levels {text!r} has {len(words)} delays; give 1 to {LEVELS_MAX}")
    return tuple(map(_delay_ms, words))


def _delay_ms(word: str) -> int:
    match = _DELAY.fullmatch(word)
    if match is None:
        raise ConfigError(f"timer.levels has {word!r}, which is no delay; write up to 4 digits and s, m, h or d")
    return int(match[1]) * UNITS_MS[match[2]]


@final
class LevelStage:
    """Moves each message with a delay level to the queue of its level in the schedule topic.

    As RocketMQ HookUtils.handleScheduleMessage. Properties keep the message's own topic and queue.
    """

    def __init__(self, broker: "Broker", levels: int, clock: DelayClock) -> None:
        self._broker = broker
        self._levels = levels
        self._clock = clock
        self.held = 0

    @property
    def stage(self) -> Stage:
        return Stage(self.hold, properties=(LEVEL.decode(),))

    def hold(self, message: Message) -> Message:
        """Return *message*; a message with a level gets the schedule topic as its topic.

        A level above the table counts as the highest one, and 0 or a negative one as none.

        Raises:
          Refused: the level is not a number (Reason.MALFORMED), or the message cannot be stored in its topic.
        """
        kind = message.sys_flag & TRANSACTION_MASK
        if message.topic in BROKER_TOPICS or kind not in (0, COMMITTED):
            return message
        level = min(self._level(message.properties), self._levels)
        if level <= 0:
            return message
        queue_id = self._broker.queue_for_later(message)
        properties = message.properties
        for key in (*TIME_KEYS, *SCHEDULE_KEYS):
            properties = remove_property(properties, key)
        properties = put_property(properties, LEVEL, b"%d" % level)
        properties = put_property(properties, REAL_TOPIC, message.topic.encode())
        message.properties = put_property(properties, REAL_QUEUE, b"%d" % queue_id)
        message.topic, message.queue_id = SCHEDULE_TOPIC, level - 1
        self._broker.store.committer.renew_clock()  # the delay begins now
        self._clock.observe(self._broker.store.appended)
        self.held += 1
        return message

    def _level(self, properties: bytes) -> int:
        text = find_property(properties, LEVEL)
        level = int(text) if _INTEGER.fullmatch(text) else INTEGER_MAX + 1
        if not -INTEGER_MAX - 1 <= level <= INTEGER_MAX:
            shown = text[:32].decode("utf-8", "replace")
            levels = f"use 1 to {self._levels}, or 0 for no delay"
            # RocketMQ answers such a message with SYSTEM_ERROR and a NumberFormatException.
            raise Refused(Reason.MALFORMED, f"property 'DELAY' {shown!r} is not a delay level; {levels}")
        return level
