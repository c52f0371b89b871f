"""What a consumer wants of a topic: an expression, and the tag hashes or the predicate made of it.

The hashes are always made here from the expression: the ``codeSet`` of heartbeats is
garbage from C++ clients and differs for non-ASCII tags from Go ones.
"""

from dataclasses import dataclass
from typing import Final, final

from martlet.broker import Broker
from martlet.contracts import Predicate
from martlet.errors import Reason, Refused
from martlet.store.codec import tags_code

__all__ = [
    "ALL",
    "EXPRESSION_CHARS_MAX",
    "KEPT_CHARS_MAX",
    "TAG",
    "Filter",
    "FilterCache",
    "Subscription",
    "make_filter",
    "split_tags",
]

TAG: Final = "TAG"

EXPRESSION_CHARS_MAX: Final = 16_384
# What one costs beside its texts.
SUBSCRIPTION_CHARS: Final = 64
FILTERS_KEPT: Final = 1024
# A longer expression is made anew each time: a thousand of the longest would take most of a GiB.
KEPT_CHARS_MAX: Final = 512


@final
@dataclass(frozen=True, slots=True)
class Filter:
    """What is compared with a queue's entries: 32-bit tag hashes, and a predicate on the record."""

    codes: frozenset[int] | None = None
    predicate: Predicate | None = None


ALL: Final = Filter()


@final
@dataclass(frozen=True, slots=True)
class Subscription:
    """One topic of a consumer group, as its members said it in a heartbeat.

    ``version`` is the client's own number, in whatever unit it counts.
    """

    topic: str
    expression: str
    kind: str
    version: int
    filter: Filter | None  # None: *expression* does not compile, or nothing here knows its *kind*
    class_filter: bool = False

    @property
    def weight(self) -> int:
        """What it counts of the characters that a connection may subscribe to."""
        return SUBSCRIPTION_CHARS + len(self.topic) + len(self.expression) + len(self.kind)

    def as_json(self) -> dict[str, object]:
        """RocketMQ's SubscriptionData."""
        tags = split_tags(self.expression) if self.kind == TAG else ()
        return {
            "classFilterMode": self.class_filter,
            "codeSet": [tags_code(tag) for tag in tags],
            "expressionType": self.kind,
            "subString": self.expression,
            "subVersion": self.version,
            "tagsSet": list(tags),
            "topic": self.topic,
        }


def split_tags(expression: str) -> tuple[str, ...]:
    """Return the tags of ``A || B``; none for ``*`` and the empty expression, which mean all (RocketMQ FilterAPI)."""
    if not expression or expression == "*":
        return ()
    return tuple(dict.fromkeys(tag for part in expression.split("||") if (tag := part.strip())))


def make_filter(broker: Broker, kind: str, expression: str) -> Filter:
    """Return the filter of *expression*.

    Raises:
      Refused: it cannot be compiled (ILLEGAL), or no plugin knows its kind (NOT_SUPPORTED).
    """
    if len(expression) > EXPRESSION_CHARS_MAX:
        text = f"expression of {len(expression)} characters is too long; at most {EXPRESSION_CHARS_MAX}"
        raise Refused(Reason.ILLEGAL, text)
    if kind in ("", TAG):
        tags = split_tags(expression)
        if tags:
            return Filter(frozenset(map(tags_code, tags)))
        if expression in ("", "*"):
            return ALL
        raise Refused(Reason.ILLEGAL, f"expression {expression!r:.80} holds no tag; write 'A || B', or '*' for all")
    compile_expression = broker.filter_compiler(kind)
    if compile_expression is None:
        # The wording of RocketMQ with enablePropertyFilter off, which clients' users search for.
        text = f"The broker does not support consumer to filter message by {kind}"
        raise Refused(Reason.NOT_SUPPORTED, f"{text}; subscribe by tags, or to '*' and filter in the consumer")
    return Filter(predicate=compile_expression(expression))


@final
class FilterCache:
    """Makes filters, and keeps those lately made: many pulls carry their expression."""

    __slots__ = ("_broker", "_made")

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._made: dict[tuple[str, str], Filter] = {}

    def get(self, kind: str, expression: str) -> Filter:
        """Return the filter of *expression*; raises as `make_filter` does."""
        found = self._made.get((kind, expression))
        if found is None:
            found = make_filter(self._broker, kind, expression)
            if len(expression) <= KEPT_CHARS_MAX:
                if len(self._made) >= FILTERS_KEPT:
                    self._made.clear()
                self._made[(kind, expression)] = found
        return found
