"""Frames of several subscribers with the same head, joined once."""

from collections import deque
from collections.abc import Sequence
from typing import Final, final

__all__ = ["JoinedFrames"]

# A subscriber collects a few deliveries before the next one collects the same.
DELIVERIES_KEPT: Final = 4


@final
class JoinedFrames:
    """The frames that were joined last: a subscriber with the same head gets the same bytes.

    Clients of one program often have the same head, as they choose the same id for their subscription.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: deque[tuple[bytes, Sequence[bytes], bytes]] = deque(maxlen=DELIVERIES_KEPT)

    def find(self, head: bytes, rests: Sequence[bytes]) -> bytes | None:
        """Return what `join` has returned for the same messages; None if it is not among the last results."""
        for kept_head, kept_rests, data in self._kept:
            if kept_rests == rests and kept_head == head:  # equal messages are the same objects
                return data
        return None

    def join(self, head: bytes, rests: Sequence[bytes]) -> bytes:
        """Return *rests* joined by *head*."""
        data = head.join(rests)
        self._kept.append((head, rests, data))
        return data
