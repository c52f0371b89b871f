"""The names that have a retained message, in order, and those of them that a topic filter matches.

A tree with a node for each level of each name takes about 200 bytes a level, 40 KB for a name of 200 levels. Here a
name takes 8 bytes in addition to its text. Names that begin with the same levels are next to each other, so a search
skips all names between one candidate and the next. The names are in blocks of our own: a look takes 0.5 us, three times
as long with the SortedList of sortedcontainers 2.4 (100,000 names).
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Final, final

from martlet_mqtt.wire.names import HIDDEN

__all__ = ["LOOKS_A_PAUSE", "SortedNames"]

# Looks at a name after which a search gives its caller a chance to pause. A look takes about 1 us, with a filter of 200
# levels 5 us, and then it counts as several.
LOOKS_A_PAUSE: Final = 256
LEVELS_A_LOOK: Final = 32
# Names in a block, at most: adding one moves those after it.
BLOCK_NAMES: Final = 1024
SEPARATOR: Final = "/"
# What follows all texts that begin with a separator; the same for names that begin with `HIDDEN`.
AFTER_SEPARATOR: Final = chr(ord(SEPARATOR) + 1)
AFTER_HIDDEN: Final = chr(ord(HIDDEN) + 1)


@final
class SortedNames:
    """A set of names in the order of their characters."""

    def __init__(self) -> None:
        self._blocks: list[list[str]] = []  # none is empty
        self._firsts: list[str] = []  # the first name of each block

    def add(self, name: str) -> None:
        """Add *name*, which is not there."""
        if not self._blocks:
            self._blocks, self._firsts = [[name]], [name]
            return
        at = max(bisect_right(self._firsts, name) - 1, 0)
        block = self._blocks[at]
        insort(block, name)
        self._firsts[at] = block[0]
        if len(block) > BLOCK_NAMES:
            half = len(block) // 2
            self._blocks.insert(at + 1, block[half:])
            self._firsts.insert(at + 1, block[half])
            del block[half:]

    def remove(self, name: str) -> None:
        """Remove *name*, which is there."""
        at = bisect_right(self._firsts, name) - 1
        block = self._blocks[at]
        del block[bisect_left(block, name)]
        if block:
            self._firsts[at] = block[0]
        else:
            del self._blocks[at], self._firsts[at]

    def first_from(self, text: str) -> str | None:
        """Return the first name that is not before *text*; None if there is none."""
        at = bisect_right(self._firsts, text)
        if at:
            block = self._blocks[at - 1]
            place = bisect_left(block, text)
            if place < len(block):
                return block[place]
        return self._firsts[at] if at < len(self._firsts) else None

    def matches(self, topic_filter: str, after: str = "") -> Iterator[str]:
        """Yield the names after *after* that *topic_filter* matches, in order, while names come and go.

        An empty text among them is no name: it gives the caller a chance to pause after `LOOKS_A_PAUSE` looks.
        """
        search = _Search(topic_filter)
        name, looked = self.first_from(max(search.start, after + "\0" if after else "")), 0
        while name is not None:
            looked += search.cost
            if looked >= LOOKS_A_PAUSE:
                looked = 0
                yield ""
            following = search.following(name)
            if following == "":
                yield name
                following = name + "\0"
            name = self.first_from(following) if following is not None else None


@final
class _Search:
    """The conditions on a name that matches *topic_filter*."""

    __slots__ = ("_hides", "_is_open", "_levels", "_literals", "cost", "start")

    def __init__(self, topic_filter: str) -> None:
        levels = topic_filter.split(SEPARATOR)
        self._hides = levels[0] in ("+", "#")  # [MQTT-4.7.2-1]
        self._is_open = levels[-1] == "#"
        if self._is_open:
            levels.pop()
        self._levels = len(levels)
        # The place and text of each level that is no wildcard, and the number of levels up to the last + before it.
        self._literals: list[tuple[int, str, int]] = []
        wild = 0
        for place, level in enumerate(levels):
            if level == "+":
                wild = place + 1
            else:
                self._literals.append((place, level, wild))
        self.start = SEPARATOR.join(levels[: levels.index("+")] if "+" in levels else levels)
        self.cost = 1 + len(levels) // LEVELS_A_LOOK

    def following(self, name: str) -> str | None:
        """Return "" if *name* matches, else a later text that no match comes before; None if none comes at all."""
        if self._hides and name.startswith(HIDDEN):
            return AFTER_HIDDEN
        count = self._levels
        levels = name.split(SEPARATOR, count)
        for place, level, wild in self._literals:
            if place >= len(levels):
                break
            if levels[place] != level:
                return self._after_mismatch(name, levels, place, level, wild)
        if len(levels) < count:
            return name + "\0"
        if len(levels) == count or self._is_open:
            return ""
        return _after(levels[:count])

    def _after_mismatch(self, name: str, levels: list[str], place: int, level: str, wild: int) -> str | None:
        """Return where to go on after *name*, whose level at *place* should be *level*; None if nowhere."""
        wanted = SEPARATOR.join([*levels[:place], level])
        if name < wanted:
            return wanted
        if place + 1 < self._levels or self._is_open:
            below = wanted + SEPARATOR
            if name < below:
                return below
        return _after(levels[:wild]) if wild else None


def _after(levels: list[str]) -> str:
    """Return what follows all names below *levels*."""
    return SEPARATOR.join(levels) + AFTER_SEPARATOR
