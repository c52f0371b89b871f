"""Names of messages, in topics whose messages have names, and topic filters as in MQTT; pure functions."""

import re
from typing import Final

from martlet.contracts import RecordView
from martlet.delivery.routing.selection import Selection, select_tags
from martlet.message import TAGS
from martlet_stomp.mapping.destinations import HIDDEN

__all__ = ["is_name", "select_names"]

TAGS_NAME: Final = TAGS.encode()


def is_name(name: str) -> bool:
    """Return whether a message with this tag, which may be empty, is for subscriptions with topic filters."""
    return bool(name) and "+" not in name and "#" not in name


def select_names(topic_filter: str) -> Selection:
    """Return the selection of messages whose name *topic_filter* matches."""
    levels = topic_filter.split("/")
    if not {"+", "#"} & set(levels):
        return select_tags((topic_filter,))
    pattern = f"(?!{re.escape(HIDDEN)})" if levels[0] in ("+", "#") else ""
    for index, level in enumerate(levels):
        if level == "#":
            pattern += "(?:/.*)?" if index else ".*"
        else:
            pattern += ("/" if index else "") + ("[^/]*" if level == "+" else re.escape(level))
    matches = re.compile(pattern, re.DOTALL).fullmatch

    def is_wanted(record: RecordView) -> bool:
        name = record.property(TAGS_NAME)
        return name is not None and is_name(name) and matches(name) is not None

    return Selection(f"names {topic_filter}", None, is_wanted)
