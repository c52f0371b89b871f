"""What a consumer wants of a topic: an expression, and the selection made of it.

The hashes are always made here from the expression: the ``codeSet`` of heartbeats is
garbage from C++ clients and differs for non-ASCII tags from Go ones.
"""

from dataclasses import dataclass
from typing import Final, final

from martlet.broker import Broker
from martlet.delivery.selection import TAG, Selection, split_tags
from martlet.errors import Reason, Refused
from martlet.store.codec import tags_code

__all__ = ["Subscription", "select"]

# What one costs beside its texts.
SUBSCRIPTION_CHARS: Final = 64


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
    selection: Selection | None  # None: *expression* does not compile, or nothing here knows its *kind*
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


def select(broker: Broker, kind: str, expression: str) -> Selection:
    """Return the selection of *expression*; RocketMQ's consumers compare tags again, so it compares their hashes.

    Raises:
      Refused: it cannot be compiled (ILLEGAL), or no plugin knows its kind (NOT_SUPPORTED).
    """
    if kind not in ("", TAG) and broker.filter_compiler(kind) is None:
        # The wording of RocketMQ with enablePropertyFilter off, which clients' users search for.
        text = f"The broker does not support consumer to filter message by {kind}"
        raise Refused(Reason.NOT_SUPPORTED, f"{text}; subscribe by tags, or to '*' and filter in the consumer")
    return broker.selection(kind or TAG, expression, exact=False)
