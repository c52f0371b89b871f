"""The owners of a table, as a data directory remembers its own, and which of their states count."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from martlet_tiered.errors import Fenced

__all__ = ["NOBODY", "Owners", "Reach"]


class Owners(Struct, frozen=True):
    """The last owners of one data directory: `epoch` is that of the last one, 0 without any.

    `names` has the parts of their names before the ``/``, and may have that of one more: the answer to a takeover may
    have been lost.
    """

    epoch: int = 0
    names: Sequence[str] = ()

    def have(self, owner: str) -> bool:
        """Return whether *owner* is one of them."""
        return owner.partition("/")[0] in self.names

    def check(self, url: str, epoch: int, owner: str) -> None:
        """Check that the table at *url*, whose owner of *epoch* is *owner*, is not continued by another directory.

        Raises:
          Fenced: it is.
        """
        if epoch > self.epoch > 0 and not self.have(owner):
            raise Fenced(
                f"table {url!r} has an owner of epoch {epoch} now, and this data directory owned it last in epoch "
                f"{self.epoch}: another one continues it, such as a restored one; start the broker with that one, or "
                "set tiered.url to an empty place",
                epoch,
            )


NOBODY: Final = Owners()


class Reach(Struct, frozen=True):
    """Which states of the broker count: up to log position `end`, where the table ends.

    A data directory took the table over from another one in `epoch`, when it ended at `begin`; 0 and 0 if none did. The
    log continued there, so states of earlier epochs count up to there only: the other one may have stored a state of
    messages that it could not commit any more.
    """

    end: int
    epoch: int = 0
    begin: int = 0

    def may_have(self, epoch: int, position: int) -> bool:
        """Return whether a state of *epoch* at *position* counts, or will once the table ends later."""
        return epoch >= self.epoch or position <= self.begin

    def has(self, epoch: int, position: int) -> bool:
        """Return whether a state of *epoch* at *position* counts."""
        return position <= self.end and self.may_have(epoch, position)
