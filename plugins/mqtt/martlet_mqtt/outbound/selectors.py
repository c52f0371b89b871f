"""Selectors: conditions in SQL92 on the properties of messages, for subscriptions of MQTT 5.

A selector is the user property ``selector`` of SUBSCRIBE, and applies to all its filters. It tests the properties of
records (`messages.py`). The plugin for the language compiles it (`Broker.selection`).
"""

from collections.abc import Callable, Mapping
from typing import Final

from martlet.broker import Broker
from martlet.contracts import RecordView
from martlet.delivery.routing.selection import CACHED_CHARS_MAX, Selection
from martlet.errors import Refused
from martlet_mqtt.mapping.frames import Grant
from martlet_mqtt.outbound.stored_subscriptions import SELECTS, grant_of
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.errors import NotAccepted
from martlet_mqtt.wire.properties import Properties

__all__ = ["check_stored", "chooser", "selection_of", "selector_of"]

LANGUAGE: Final = "SQL92"
PROPERTY: Final = "selector"


def selector_of(broker: Broker, properties: Properties) -> str:
    """Return the selector of a SUBSCRIBE with *properties*; empty if it has none. Raises `NotAccepted`."""
    selectors = [value for name, value in properties.user if name == PROPERTY]
    if not selectors:
        return ""
    reason = ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
    if len(selectors) > 1:
        raise NotAccepted(f"there are {len(selectors)} user properties {PROPERTY!r}; send one", reason)
    selector = selectors[0]
    if not selector or len(selector) > CACHED_CHARS_MAX:
        text = f"a selector has {len(selector)} characters; send 1 to {CACHED_CHARS_MAX}"
        raise NotAccepted(text, reason)
    try:
        selection_of(broker, selector)
    except Refused as refused:
        raise NotAccepted(f"the selector cannot be used; {refused}", reason) from refused
    return selector


def selection_of(broker: Broker, selector: str) -> Selection:
    """Return the compiled *selector*, usually from the cache. Raises `Refused`."""
    return broker.selection(LANGUAGE, selector)


def chooser(broker: Broker, grants: tuple[Grant, ...]) -> Callable[[RecordView], tuple[Grant, ...]]:
    """Return a function of a record that returns the *grants* whose selectors accept it. Raises `Refused`."""
    predicates = [selection_of(broker, grant.selector).predicate if grant.selector else None for grant in grants]
    pairs = list(zip(grants, predicates, strict=True))

    def choose(record: RecordView) -> tuple[Grant, ...]:
        return tuple([grant for grant, holds in pairs if holds is None or holds(record)])

    return choose


def check_stored(broker: Broker, filters: Mapping[str, bytes]) -> None:
    """Raise `NotAccepted` if a selector in a session's *filters* cannot be used: the client would miss messages."""
    for topic_filter, options in filters.items():
        if options[0] & SELECTS:
            try:
                selection_of(broker, grant_of(topic_filter, options).selector)
            except Refused as refused:
                text = f"the session has a subscription with a selector that cannot be used; {refused}"
                raise NotAccepted(text, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR) from refused
