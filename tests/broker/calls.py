"""Counts calls of functions, for tests that bound the work of one step."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Self


class Calls:
    """Counts the calls in its block of those functions for which *wanted* is true."""

    def __init__(self, wanted: Callable[[CodeType], bool]) -> None:
        self.count = 0
        self._wanted = wanted

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *args: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call" and self._wanted(frame.f_code)
