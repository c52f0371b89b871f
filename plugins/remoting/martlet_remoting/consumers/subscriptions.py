"""A consumer's subscription to a topic: an expression, and the selection compiled from it.

The tag hashes are always computed from the expression, because the ``codeSet`` in heartbeats
is wrong: C++ clients send garbage, Go clients other hashes for non-ASCII tags.
"""

from typing import Final, final

from msgspec import Struct

from martlet.broker import Broker
from martlet.delivery.routing.selection import TAG, Selection, split_tags
from martlet.errors import Reason, Refused
from martlet.records.codec import tags_code

__all__ = ["GroupSubscription", "select"]

# Kind of expression -> the plugin to name in errors if the kind is not supported.
PLUGINS: Final = {"SQL92": "filter_sql92"}
# The cost of a subscription in addition to its texts.
SUBSCRIPTION_CHARS: Final = 64


@final
class GroupSubscription(Struct, frozen=True):
    """A consumer group's subscription to one topic, from a heartbeat.

    ``version`` is a number chosen by the client; a higher one is newer.
    """

    topic: str
    expression: str
    kind: str
    version: int
    selection: Selection | None  # None: see `fault`
    class_filter: bool = False
    fault: str = ""  # error: *expression* does not compile, or its *kind* is not supported

    @property
    def weight(self) -> int:
        """The weight of the subscription in the limit of characters that a connection may subscribe to."""
        return SUBSCRIPTION_CHARS + len(self.topic) + len(self.expression) + len(self.kind) + len(self.fault)

    def as_json(self) -> dict[str, object]:
        """Return RocketMQ's SubscriptionData."""
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
    """Compile *expression*; tags are compared by hash only, because RocketMQ's consumers compare them again.

    Raises:
      Refused: the expression does not compile (ILLEGAL), or no plugin supports its kind (NOT_SUPPORTED).
    """
    if kind not in ("", TAG) and broker.filter_compiler(kind) is None:
        # RocketMQ's text with enablePropertyFilter off, which users search for.
        text = f"The broker does not support consumer to filter message by {kind:.80}; "
        text += f"add plugin {PLUGINS[kind]!r} to plugins.enabled, or " if kind in PLUGINS else ""
        raise Refused(Reason.NOT_SUPPORTED, f"{text}subscribe by tags")
    return broker.selection(kind or TAG, expression, exact=False)
