"""Filters of the source: by tags, by key and by SQL92; the broker evaluates them as far as it can, the source again.

Brokers compare tags by their hashes, and RocketMQ's do not know the key of a message, so batches are filtered again by
tag and key. SQL92 is evaluated by the broker alone.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, final

import pyarrow as pa
import pyarrow.compute as pc

from martlet_spark.errors import OptionError

__all__ = ["LANGUAGE", "Filter"]

LANGUAGE: Final = "SQL92"
MATCH_ALL: Final = "*"
# Text that looks like SQL and that no usual tag has: a comparison between blanks, or with a text in quotes.
COMPARISON: Final = re.compile(r"\s(?:=|<>|[<>]=?)\s|(?:=|<>|[<>]=?|\s(?i:LIKE))\s*'")


@final
class Filter:
    """The filter of a query: messages with one of *tags*, with *key* and for which *sql* is true; "" matches all.

    Raises:
      OptionError: *tags* or *key* could match no message, or other messages than meant.
    """

    __slots__ = ("_key", "_sql", "_tags")

    def __init__(self, tags: str = "", key: str = "", sql: str = "") -> None:
        self._tags = _split(tags)
        if " " in key.strip():
            raise OptionError(f"option key {key!r} has a space, which separates the keys of a message; give one key")
        self._key = key.strip()
        self._sql = sql.strip()

    @property
    def is_everything(self) -> bool:
        """Whether the filter matches every message."""
        return not (self._tags or self._key or self._sql)

    @property
    def has_sql(self) -> bool:
        """Whether the broker evaluates an expression of the user."""
        return bool(self._sql)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `select` needs."""
        return (("tag",) if self._tags else ()) + (("key",) if self._key else ())

    def fields(self, *, knows_like: bool) -> Mapping[str, object]:
        """Return the filter as header fields of a request; *knows_like* says whether the broker's SQL92 has LIKE."""
        parts = [f"({self._sql})"] if self._sql else []
        if self._key and knows_like:
            parts.append(_key_condition(self._key))
        if parts:
            return {"expressionType": LANGUAGE, "subscription": " AND ".join(parts)}
        return {"expressionType": "TAG", "subscription": " || ".join(self._tags) or MATCH_ALL}

    def select(self, batch: Any) -> Any:
        """Return the rows of *batch* whose tag and key match."""
        if self._tags:
            batch = batch.filter(pc.is_in(batch.column("tag"), pa.array(self._tags)))
        if self._key:
            padded = pc.binary_join_element_wise("", batch.column("key"), "", " ")
            batch = batch.filter(pc.match_substring(padded, f" {self._key} "))
        return batch


def _split(expression: str) -> tuple[str, ...]:
    """Return the tags of ``A || B``, none for all; two bars separate tags as in RocketMQ's FilterAPI."""
    tags = tuple(dict.fromkeys(tag for part in expression.split("||") if (tag := part.strip())))
    if tags == (MATCH_ALL,):
        return ()
    if "||" in expression and not tags:
        raise OptionError(f"option tags {expression!r} has no tag; write 'paid || sent'")
    if MATCH_ALL in tags:
        raise OptionError(
            f"option tags {expression!r} mixes '*' with tags; leave '*' out, or leave the option out for all"
        )
    if COMPARISON.search(expression):
        raise OptionError(f"option tags {expression!r} looks like SQL92; give it as option sql")
    return tags


def _key_condition(key: str) -> str:
    """Return the condition that *key* is one of a message's keys, which are separated by spaces."""
    text = key.replace("'", "''")
    like = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    forms = [f"KEYS LIKE '{form}' ESCAPE '\\'" for form in (f"{like} %", f"% {like}", f"% {like} %")]
    return f"(KEYS = '{text}' OR {' OR '.join(forms)})"
