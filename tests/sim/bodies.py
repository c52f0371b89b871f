"""Bodies of simulated messages, which tell everything about their message: key, tag, and how the broker holds it."""

import random
import re
from typing import Final, NamedTuple

__all__ = [
    "LEVELS",
    "LEVELS_S",
    "LIGHT_TOPICS",
    "Hold",
    "hold_of",
    "key_of",
    "light_topics_of",
    "make_body",
    "producer_group",
    "properties_of",
    "tag_of",
]

LIGHT_TOPICS: Final = ("%LMQ%x", "%LMQ%y")
LEVELS: Final = "1s 3s 7s"
LEVELS_S: Final = (1.0, 3.0, 7.0)
# ``ph0-12:L2;...``: only producers whose names begin with "ph" send messages that are held.
_HOLD: Final = re.compile(rb"ph\d+-\d+:([LMDCRU])(\d+);")


class Hold(NamedTuple):
    """How the broker holds a message.

    ``kind`` is L for a delay level, M for a delay in ms and D for a time in ms, which ``number`` gives. Half messages
    have C if their producer commits them, R if it rolls them back and U if it never decides; ``number`` is how many
    checks it answers only with "unknown" before that.
    """

    kind: str
    number: int

    @property
    def is_half(self) -> bool:
        return self.kind in "CRU"


def hold_of(body: bytes) -> Hold | None:
    """Return how the message with this body is held; None if it is delivered at once."""
    match = _HOLD.match(body)
    return Hold(match[1].decode(), int(match[2])) if match is not None else None


def tag_of(body: bytes) -> str:
    """The tag that simulated producers give to a message with this body."""
    return f"t{len(body) % 3}"


def light_topics_of(body: bytes) -> list[str]:
    """The light topics that index the message with this body, where there are light queues."""
    return [topic for topic, each in zip(LIGHT_TOPICS, (2, 5), strict=True) if len(body) % each == 0]


def key_of(body: bytes) -> str:
    """The unique key of a message with this body, which is its own: ``p0-12:...`` has ``p012``."""
    return body.partition(b":")[0].decode().replace("-", "")


def producer_group(body: bytes) -> str:
    """The producer group of the half message with this body."""
    return f"group-{body.partition(b'-')[0].decode()}"


def properties_of(body: bytes, light: bool) -> str:
    """The properties of the message with this body; *light* lets light queues index some."""
    names = light_topics_of(body) if light else []
    dispatch = f"INNER_MULTI_DISPATCH\x01{','.join(names)}\x02" if names else ""
    return f"UNIQ_KEY\x01{key_of(body)}\x02TAGS\x01{tag_of(body)}\x02{dispatch}{_hold_properties(body)}"


def _hold_properties(body: bytes) -> str:
    hold = hold_of(body)
    if hold is None:
        return ""
    if hold.is_half:
        return f"TRAN_MSG\x01true\x02PGROUP\x01{producer_group(body)}\x02"
    name = {"L": "DELAY", "M": "TIMER_DELAY_MS", "D": "TIMER_DELIVER_MS"}[hold.kind]
    return f"{name}\x01{hold.number}\x02"


def make_body(name: str, number: int, chance: random.Random, hold: str = "") -> bytes:
    """A body like no other, mostly short; *hold* says how to hold the message, such as ``L2``."""
    size = chance.choice([0, 10, 100, 300, 3000] if not hold else [0, 10, 100, 1000])
    return f"{name}-{number}:{hold}{';' if hold else ''}".encode() + chance.randbytes(chance.randint(0, size))
