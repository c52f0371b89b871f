"""Selections decide which records a consumer gets; compiled from an expression of a filter language.

All protocols get their selections from `Broker.selection`, so tags and the languages of plugins mean the same
everywhere. Compiled selections are cached, since many consumers, and every RocketMQ pull, use the same expression.
"""

from collections.abc import Callable, Sequence
from typing import Final, final

from msgspec import Struct

from martlet.contracts import Compile, Condition, Predicate, RecordView
from martlet.errors import Reason, Refused
from martlet.message import TAGS
from martlet.records.codec import tags_code

__all__ = [
    "CACHED_CHARS_MAX",
    "EVERYTHING",
    "EXPRESSION_CHARS_MAX",
    "TAG",
    "Selection",
    "Selections",
    "select_tags",
    "split_tags",
]

TAG: Final = "TAG"
EXPRESSION_CHARS_MAX: Final = 16_384
# Longer expressions are compiled each time: a thousand of the longest would take most of a GiB.
CACHED_CHARS_MAX: Final = 512
CACHED_MAX: Final = 1024
TAGS_NAME: Final = TAGS.encode()


class Selection(Struct, frozen=True):
    """Decides which records a subscriber gets.

    Args:
      name: identifies the selection: subscribers whose selections have the same name share encoded bytes.
      codes: hashes of tags (`martlet.records.codec.tags_code`); None for every tag. Different tags can have the same
        hash, so an exact selection has a predicate as well.
      predicate: takes a view of one record, and returns whether to deliver it. It may run in a thread.
    """

    name: str = ""
    codes: frozenset[int] | None = None
    predicate: Predicate | None = None

    def both(self, other: "Selection") -> "Selection":
        """Return the selection of the records that both this selection and *other* select."""
        if self is EVERYTHING or other is EVERYTHING:
            return other if self is EVERYTHING else self
        codes = self.codes
        if codes is None or other.codes is None:
            codes = other.codes if codes is None else codes
        else:
            codes &= other.codes
        return Selection(f"{self.name} and {other.name}", codes, _both(self.predicate, other.predicate))


# Selects every record.
EVERYTHING: Final = Selection()


def _both(first: Predicate | None, second: Predicate | None) -> Predicate | None:
    if first is None or second is None:
        return second if first is None else first
    first_holds, second_holds = first, second

    def holds(record: RecordView) -> bool:
        return first_holds(record) and second_holds(record)

    conditions = [each for each in (first, second) if isinstance(each, Condition)]
    if not conditions:
        return holds
    cost = sum(each.cost for each in conditions)
    # If both languages count steps, the steps of the second are not counted.
    steps = next((each.steps for each in conditions if each.steps is not None), None)
    return Condition(holds, cost, next((each.find for each in conditions if each.find is not None), None), steps)


def split_tags(expression: str) -> tuple[str, ...]:
    """Return the tags of ``A || B``; none for ``*`` and the empty expression, which mean all (RocketMQ FilterAPI)."""
    if not expression or expression == "*":
        return ()
    return tuple(dict.fromkeys(tag for part in expression.split("||") if (tag := part.strip())))


def select_tags(tags: Sequence[str], *, exact: bool = True) -> Selection:
    """Return the selection of records with one of *tags*; of all records if there are none.

    Args:
      exact: compare the tags themselves. Otherwise only their hashes are compared, which RocketMQ's consumers
        expect: they compare the tags again.
    """
    if not tags:
        return EVERYTHING
    tag_set = frozenset(tags)
    predicate: Predicate | None = (lambda record: record.property(TAGS_NAME) in tag_set) if exact else None
    return Selection(
        f"{TAG if exact else 'hash'} {' || '.join(sorted(tag_set))}", frozenset(map(tags_code, tag_set)), predicate
    )


@final
class Selections:
    """Compiles selections, and caches recent ones."""

    def __init__(self, compiler_of: Callable[[str], Compile | None]) -> None:
        self._compiler_of = compiler_of
        self._cached: dict[tuple[str, str, bool], Selection] = {}

    def get(self, language: str, expression: str, exact: bool) -> Selection:
        key = (language, expression, exact)
        selection = self._cached.get(key)
        if selection is None:
            selection = self._compile(language, expression, exact)
            if len(expression) <= CACHED_CHARS_MAX:
                if len(self._cached) >= CACHED_MAX:
                    self._cached.clear()
                self._cached[key] = selection
        return selection

    def forget(self) -> None:
        """Drop cached selections; the next use of each compiles it again."""
        self._cached.clear()

    def _compile(self, language: str, expression: str, exact: bool) -> Selection:
        if len(expression) > EXPRESSION_CHARS_MAX:
            text = f"expression of {len(expression)} characters is too long; the maximum is {EXPRESSION_CHARS_MAX}"
            raise Refused(Reason.ILLEGAL, text)
        if language == TAG:
            tags = split_tags(expression)
            if not tags and expression not in ("", "*"):
                text = f"expression {expression!r:.80} contains no tag; write 'A || B', or '*' for all"
                raise Refused(Reason.ILLEGAL, text)
            return select_tags(tags, exact=exact)
        compile_expression = self._compiler_of(language)
        if compile_expression is None:
            text = f"filter language {language!r:.80} is not installed; enable its plugin, or select by tags"
            raise Refused(Reason.NOT_SUPPORTED, text)
        return Selection(f"{language} {expression}", None, compile_expression(expression))
