"""The code in a consume-queue entry besides position and size.

Usually it is the hash code of the TAGS property, by which consumers filter. A plugin may supply another for a topic: in
RocketMQ's schedule topic it is the time at which the message is due (CommitLog.checkMessageAndReturnSize).
"""

import logging
from typing import Final, final

from martlet.message import find_property
from martlet.records.codec import tags_code
from martlet.records.layout import Dispatcher

__all__ = ["TagCodes", "find_tags", "guarded_dispatcher"]

logger = logging.getLogger("martlet.store")

# Tags to cache in each of two generations: more than most MQTT brokers have topic names. Longer tags are not cached, so
# both generations together use less than 48 MB.
REMEMBERED_MAX: Final = 65_536
REMEMBERED_BYTES_MAX: Final = 256


@final
class TagCodes:
    """Computes the code of a property string; caches the codes of recent tags.

    A tag is evicted if it is not used while a generation fills with other tags.
    """

    def __init__(self) -> None:
        self._codes: dict[bytes, int] = {}
        self._before: dict[bytes, int] = {}

    def of(self, properties: bytes) -> int:
        """Return the code of the TAGS in *properties*; 0 without TAGS."""
        at = properties.rfind(b"TAGS\x01")  # like `find_tags`, without a call per message
        if at < 0:
            return 0
        if at and properties[at - 1] != 2:
            tags = find_property(properties, b"TAGS")
        else:
            end = properties.find(2, at)
            tags = properties[at + 5 : end] if end >= 0 else properties[at + 5 :]
        code = self._codes.get(tags)
        return self._look_up(tags) if code is None else code

    def _look_up(self, tags: bytes) -> int:
        code = self._before.get(tags)
        if code is None:
            code = tags_code(tags)
            if len(tags) > REMEMBERED_BYTES_MAX:
                return code
        if len(self._codes) >= REMEMBERED_MAX:
            self._before, self._codes = self._codes, {}
        self._codes[tags] = code
        return code


def find_tags(properties: bytes) -> bytes:
    """As ``find_property(properties, b"TAGS")``, in half the time."""
    at = properties.rfind(b"TAGS\x01")
    if at < 0:
        return b""
    if at and properties[at - 1] != 2:  # the end of a longer name, or a part of a value
        return find_property(properties, b"TAGS")
    end = properties.find(2, at)
    return properties[at + 5 : end] if end >= 0 else properties[at + 5 :]


def guarded_dispatcher(plugin: str, topic: str, dispatch: Dispatcher) -> Dispatcher:
    """Return *dispatch* wrapped so that a message gets into its queue even if it raises; that is logged once."""
    told = False
    codes = TagCodes()

    def code_of(properties: bytes, store_ms: int) -> int:
        nonlocal told
        try:
            code = int(dispatch(properties, store_ms))
            if -(1 << 63) <= code < 1 << 63:
                return code
            raise ValueError(f"code {code} is not an i64")
        except Exception:
            if not told:
                told = True
                logger.exception("plugin %r failed to dispatch messages of topic %s", plugin, topic)
            return codes.of(properties)

    return code_of
