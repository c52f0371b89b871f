"""Protocol errors, and their texts in ERROR frames."""

from typing import Final

from martlet.errors import RemoteProtocolError

__all__ = ["StompError", "UnknownVersion", "shown"]

SHOWN_MAX: Final = 60


class StompError(RemoteProtocolError):
    """A frame breaks the protocol, or the broker does not support its request: ERROR, and the connection closes.

    The text is ``<what> <is wrong>; <what to do>``. ``receipt`` is the frame's, in the form of `packets.py`.
    """

    def __init__(self, text: str, receipt: bytes | None = None) -> None:
        super().__init__(text)
        self.receipt = receipt


class UnknownVersion(StompError):
    """The client speaks no version of STOMP that the broker speaks; the ERROR frame lists the broker's versions."""


def shown(text: str) -> str:
    """Return *text* for an error: in quotes, shortened, and with a mark instead of each control character."""
    start = "".join([each if each.isprintable() else "�" for each in text[:SHOWN_MAX]])
    return f"'{start}...'" if len(text) > SHOWN_MAX else f"'{start}'"
