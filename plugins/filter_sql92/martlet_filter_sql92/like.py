"""LIKE without regular expressions: a pattern is cut at its ``%`` into segments that are searched one after the other.

The first match of each segment is always the right one, as with any glob, so there is no backtracking. A segment with
``_`` is searched by its longest run of plain characters. Places where this run matches and the segment does not are
counted as steps, so a text made to be slow ends as UNKNOWN.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from msgspec import Struct

__all__ = ["STEPS_MAX", "compile_like", "is_slow"]

STEPS_MAX: Final = 10_000  # by all patterns of an expression on one message
ANY: Final = None  # a character class of one: any character


class _TooManySteps(Exception):
    """A text takes too many steps: it was made to be slow."""


class _Segment(Struct, frozen=True):
    """The ``length`` characters between two ``%``, with runs of plain characters at fixed places."""

    length: int
    runs: tuple[tuple[int, str], ...]  # (place in the segment, characters), longest first

    def fits(self, text: str, at: int) -> bool:
        """Return whether the segment matches *text* from *at* on."""
        if at + self.length > len(text):
            return False
        for place, run in self.runs:  # noqa: SIM110 (twice as fast as all())
            if not text.startswith(run, at + place):
                return False
        return True

    def find(self, text: str, at: int, end: int, steps: list[int]) -> int:
        """Return the first index of a match in ``text[at:end]``, -1 for none; *steps* has the number of steps left."""
        if not self.runs:
            return at if at + self.length <= end else -1
        place, run = self.runs[0]
        last = end - self.length
        while at <= last:
            run_start = text.find(run, at + place, last + place + len(run))
            if run_start < 0:
                return -1
            at = run_start - place
            if self.fits(text, at):
                return at
            at += 1
            steps[0] -= len(self.runs)
            if steps[0] <= 0:
                raise _TooManySteps
        return -1


def is_slow(pattern: str, escape: str) -> bool:
    """Return whether *pattern* takes many steps on some texts."""
    return any(
        segment.runs and segment.length > len(segment.runs[0][1]) for segment in _segments(pattern, escape)[1:-1]
    )


def compile_like(pattern: str, escape: str) -> Callable[[str, list[int]], bool | None]:
    """Return the predicate of texts that match *pattern*: ``%`` is any text, ``_`` any character, *escape* quotes both.

    The predicate's second argument has the number of steps left, and is counted down; at zero the result is None.
    """
    segments = _segments(pattern, escape)
    first, last = segments[0], segments[-1]
    if len(segments) == 1:
        return lambda text, steps: len(text) == first.length and first.fits(text, 0)
    middle = [segment for segment in segments[1:-1] if segment.length]
    least = sum(segment.length for segment in segments)

    def matches(text: str, steps: list[int]) -> bool | None:
        end = len(text) - last.length
        if len(text) < least or not first.fits(text, 0) or not last.fits(text, end):
            return False
        at = first.length
        try:
            for segment in middle:
                at = segment.find(text, at, end, steps)
                if at < 0:
                    return False
                at += segment.length
        except _TooManySteps:
            return None
        return True

    return matches


@lru_cache(maxsize=4)  # the compiler asks several times for one pattern, and 2,000 segments take 5 ms
def _segments(pattern: str, escape: str) -> tuple[_Segment, ...]:
    """Split *pattern* at each ``%``; there is always one segment more than ``%``."""
    segments: list[_Segment] = []
    characters: list[str | None] = []
    quoted = False
    for character in pattern:
        if quoted:
            characters.append(character)
            quoted = False
        elif character == escape:
            quoted = True
        elif character == "%":
            segments.append(_segment(characters))
            characters = []
        else:
            characters.append(ANY if character == "_" else character)
    segments.append(_segment(characters))
    return tuple(segments)


def _segment(characters: list[str | None]) -> _Segment:
    runs: list[tuple[int, str]] = []
    begin = 0
    for place, character in enumerate([*characters, ANY]):
        if character is ANY:
            run = "".join(c for c in characters[begin:place] if c is not None)
            if run:
                runs.append((begin, run))
            begin = place + 1
    runs.sort(key=lambda found: -len(found[1]))
    return _Segment(len(characters), tuple(runs))
