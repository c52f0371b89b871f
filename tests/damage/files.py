"""Every file that Martlet keeps in its data directory, as docs/operations.md lists them.

A plugin that adds a file adds a line here, and one there: `test_data_files` compares both with what a broker with all
plugins leaves behind, and damages each of them. The simulation and the tests with real processes damage those of the
list that are derived.
"""

from dataclasses import dataclass
from enum import Enum
from re import escape, fullmatch
from typing import Final

__all__ = ["FILES", "DataFile", "Kind", "file_of", "is_derived"]


class Kind(Enum):
    """What damage to a file means."""

    LOG = "the log"  # the truth: damage costs the damaged records
    DERIVED = "derived"  # computed from the log: damage to it, and its absence, change nothing
    COPIED = "copied"  # kept nowhere else, but twice: damage to one of the two copies changes nothing
    MARK = "mark"  # says that a process runs, or did


@dataclass(frozen=True)
class DataFile:
    """The files with *name*, in which ``TOPIC``, ``QUEUE``, ``TIME`` and a row of ``0`` stand for what varies.

    ``has_bak``: there is a second file with the same name and ``.bak``.
    """

    name: str
    kind: Kind
    has_bak: bool = False

    def matches(self, path: str) -> bool:
        """Return whether the file at *path* in the data directory is one of these."""
        pattern = escape(self.name)
        for what, varies in (("TOPIC", "[^/]+"), ("QUEUE", r"\d+"), ("TIME", r"\d{17}")):
            pattern = pattern.replace(what, varies)
        digits = len(self.name) - len(self.name.rstrip("0"))
        if digits > 1:
            pattern = pattern[:-digits] + rf"\d{{{digits}}}"
        return fullmatch(pattern + (r"(\.bak)?" if self.has_bak else ""), path) is not None


FILES: Final = (
    DataFile("commitlog/00000000000000000000", Kind.LOG),
    DataFile("consumequeue/TOPIC/QUEUE/00000000000000000000", Kind.DERIVED),
    DataFile("index/TIME", Kind.DERIVED),
    DataFile("checkpoint", Kind.DERIVED),
    DataFile("queues.0000000000", Kind.DERIVED),
    DataFile("abort", Kind.MARK),
    DataFile("lock", Kind.MARK),
    DataFile("space.probe", Kind.MARK),
    DataFile("config/topics.json", Kind.COPIED, has_bak=True),
    DataFile("config/subscriptionGroup.json", Kind.COPIED, has_bak=True),
    DataFile("config/consumerOffset.json", Kind.COPIED, has_bak=True),
    DataFile("config/lmqConsumerOffset.json", Kind.DERIVED, has_bak=True),
    DataFile("config/shared-groups.snapshot", Kind.DERIVED, has_bak=True),
    DataFile("config/sessions.snapshot", Kind.DERIVED, has_bak=True),
    # remoting
    DataFile("config/messageRequestMode.json", Kind.COPIED, has_bak=True),
    DataFile("config/kvConfig.json", Kind.COPIED, has_bak=True),
    # timer
    DataFile("config/delayOffset.json", Kind.DERIVED, has_bak=True),
    DataFile("config/delay-levels.snapshot", Kind.DERIVED, has_bak=True),
    DataFile("config/timers.snapshot", Kind.DERIVED, has_bak=True),
    DataFile("config/timercheck", Kind.DERIVED, has_bak=True),
    DataFile("timerwheel", Kind.DERIVED),
    DataFile("timerlog/00000000000000000000", Kind.DERIVED),
    # tx
    DataFile("config/tx.snapshot", Kind.DERIVED, has_bak=True),
    DataFile("config/tx-external.snapshot", Kind.DERIVED, has_bak=True),
    # mqtt
    DataFile("config/mqtt-retained.snapshot", Kind.DERIVED, has_bak=True),
)


def is_derived(path: str) -> bool:
    """Return whether the file at *path* in the data directory is computed from the log."""
    found = file_of(path)
    return found is not None and found.kind is Kind.DERIVED


def file_of(path: str) -> DataFile | None:
    """Return which of `FILES` the file at *path* in the data directory is; None if it is none of them."""
    return next((each for each in FILES if each.matches(path)), None)
