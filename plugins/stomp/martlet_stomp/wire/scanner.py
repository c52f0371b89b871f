"""Scanners for runs of SEND and of ACK frames in the receive buffer, without an object for each frame; pure functions.

A publisher at full speed sends the same header lines again and again, so they are decoded once and then looked up by
their bytes, without the value of the receipt, which differs in each frame. The codec decodes frames with unusual
headers, and reports every error.

The native kernel has both scans as well; see `martlet.runtime.native`.
"""

import re
from typing import Final, TypeAlias, final

from martlet_stomp.wire.codec import Limits, content_length, decode_head
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.events import OF_FRAME, receipt_of
from martlet_stomp.wire.packets import AckRun, MessageHeaders, SendRun, Version

__all__ = ["LIST", "KnownHeads", "known_heads", "scan_ack_frames", "scan_send_frames"]

RUN_FRAMES_MAX: Final = 1024
# Most frames with new header lines in a run: each takes about 15 us, so such a run takes 2 ms. 256 bytes of header
# lines count as a frame.
RUN_LEARNED_MAX: Final = 128
HEAD_BYTES_MAX: Final = 4096
ACKS_BYTES_MAX: Final = 16_384
# Most cached header lines, and their bytes; beyond these all are dropped.
HEADS_KEPT: Final = 4096
HEADS_BYTES_KEPT: Final = 1 << 20
SEND: Final = b"SEND\n"
# Part of a list of destinations.
LIST: Final = ",/"
ACK: Final = b"ACK\n"
_RECEIPT: Final = b"\nreceipt:"
# The characters of a receipt without escapes.
_PLAIN: Final = bytes(range(33, 127)).translate(None, b":\\")
_RECEIPT_LINE: Final = rb"receipt:([!-9;-\[\]-~]{1,200})\n"
_SUBSCRIPTION_LINE: Final = rb"subscription:[ -\[\]-~]{0,200}\n"
_DIGITS_ONLY: Final = bytes(each if 48 <= each <= 57 else 32 for each in range(256))
_ID: Final = (rb"message-id:", rb"message-id:", rb"id:")
_PLAIN_ACKS: Final = [
    re.compile(rb"(?:ACK\n%b[0-9]{1,9}-[0-9]{1,5}-[0-9]{1,18}\n\n\0\n?){1,%d}" % (each, RUN_FRAMES_MAX)) for each in _ID
]
_ACKS: Final = [
    re.compile(
        rb"(ACK\n(?:%b)?%b([0-9]{1,9})-([0-9]{1,5})-([0-9]{1,18})\n(?:%b)?(?:%b)?(?:%b)?\n\0\n?)|(?s:.+)"
        % (_SUBSCRIPTION_LINE, each, _SUBSCRIPTION_LINE, _RECEIPT_LINE, _SUBSCRIPTION_LINE)
    )
    for each in _ID
]


# The decoded header lines of a SEND frame, without its receipt: the headers of the message, the size of its body in
# bytes, negative if it ends with the first NUL, and the transaction.
_Head: TypeAlias = tuple[MessageHeaders, int, str | None]


@final
class KnownHeads:
    """A cache of the decoded header lines of SEND frames, for all clients of one version."""

    def __init__(self, version: Version, limits: Limits) -> None:
        self.version: Final = version
        self.limits: Final = limits
        # Longest header lines in a run; a receipt line alone must not exceed the limit of a line.
        self.window: Final = min(HEAD_BYTES_MAX, limits.header_bytes_max - len(_RECEIPT))
        # The key is the header lines with the command and the blank line, but without the value of the receipt.
        self.table: Final[dict[bytes, _Head]] = {}
        self._headers: Final[dict[tuple[str, tuple[tuple[str, str], ...]], MessageHeaders]] = {}
        self._bytes = 0

    def learn(self, head: bytes) -> _Head | None:
        """Decode and cache *head*, a key of the table; None if the codec must decode it."""
        if not head.startswith(SEND) or b"\r" in head:
            return None
        try:
            found = self._head_of(decode_head(head[:-2], self.version, self.limits).headers, len(head))
        except StompError:
            return None
        if LIST in found[0].destination:
            return None  # a run of such frames would take too long
        self._make_room(len(head))
        self.table[head] = found
        return found

    def run_of(self, headers: dict[str, str], size: int, body: bytes) -> SendRun:
        """Return the run of one SEND frame, whose *headers* have *size* bytes. Raises `StompError`."""
        message_headers, _, transaction = self._head_of(headers, size)
        receipt = receipt_of(headers, self.version)
        receipts, asking = ((), ()) if receipt is None else ((receipt,), (0,))
        return SendRun([message_headers], [body], receipts, asking, transaction)

    def _head_of(self, headers: dict[str, str], size: int) -> _Head:
        destination = headers.get("destination")
        if not destination:
            raise StompError("SEND has no header 'destination'; it is required")
        body_bytes = content_length(headers)
        pairs = tuple([each for each in headers.items() if each[0] not in OF_FRAME])
        key = destination, pairs
        known = self._headers.get(key)
        if known is None:
            known = MessageHeaders(destination, pairs, size)
            if size <= HEAD_BYTES_MAX:
                self._make_room(size)
                self._headers[key] = known
        return known, body_bytes, headers.get("transaction")

    def _make_room(self, size: int) -> None:
        """Drop all entries if there is no room for *size* more bytes."""
        self._bytes += size
        if len(self.table) + len(self._headers) >= HEADS_KEPT or self._bytes > HEADS_BYTES_KEPT:
            self.table.clear()
            self._headers.clear()
            self._bytes = size

    def __len__(self) -> int:
        return len(self.table) + len(self._headers)


def known_heads(limits: Limits) -> list[KnownHeads]:
    """Return an empty table for each version, for all clients of a port."""
    return [KnownHeads(version, limits) for version in Version]


def scan_send_frames(data: bytes, at: int, heads: KnownHeads) -> tuple[SendRun, int] | None:
    """Return the run of SEND frames at *at* and its end; None if the codec must decode the frame there.

    The run ends after `RUN_FRAMES_MAX` frames, or `RUN_LEARNED_MAX` with new header lines.
    """
    table, window, bytes_max, size = heads.table, heads.window, heads.limits.frame_bytes_max, len(data)
    found: list[MessageHeaders] = []
    bodies: list[bytes] = []
    receipts: list[bytes] = []
    asking: list[int] = []
    # The header lines of the previous frame; with a receipt, the bytes before and after its value.
    before, after, before_bytes, after_bytes = b"\0", b"", 0, 0
    headers: MessageHeaders | None = None
    transaction: str | None = None
    body_bytes, receipt, learned = 0, b"", 0
    while len(bodies) < RUN_FRAMES_MAX:
        is_known, begin = data.startswith(before, at), at + before_bytes
        if after and is_known:
            line_end = data.find(b"\n", begin, begin + window)
            is_known = data.startswith(after, line_end)
            if is_known:
                receipt, begin = data[begin:line_end], line_end + after_bytes
        if not is_known:
            stop = data.find(b"\n\n", at, at + window)
            cut, begin = data.find(_RECEIPT, at, stop), stop + 2
            if stop < 0:
                break
            if cut < 0:
                key = before = data[at:begin]
                after = b""
            else:
                line_end = data.find(b"\n", cut + 9, begin)
                before, receipt, after = data[at : cut + 9], data[cut + 9 : line_end], data[line_end:begin]
                key = before + after
            before_bytes, after_bytes = len(before), len(after)
            head = table.get(key)
            if head is None and learned < RUN_LEARNED_MAX:
                head, learned = heads.learn(key), learned + 1 + len(key) // 256
            if head is None or (head[2] != transaction and bodies):
                break
            headers, body_bytes, transaction = head
        end = begin + body_bytes if body_bytes >= 0 else data.find(0, begin)
        if end < begin or end >= size or data[end] or end - at >= bytes_max:
            break
        if after:
            if not receipt or receipt.translate(None, _PLAIN):
                break
            asking.append(len(bodies))
            receipts.append(receipt)
        assert headers is not None
        found.append(headers)
        bodies.append(data[begin:end])
        at = end + 1
        if at < size and data[at] == 10:
            at += 1
    return (SendRun(found, bodies, receipts, asking, transaction), at) if bodies else None


def scan_ack_frames(data: bytes, at: int, version: Version) -> tuple[AckRun, int] | None:
    """Return the run of ACK frames at *at* and its end; None if the codec must decode the frame there.

    The run ends after about `ACKS_BYTES_MAX` bytes.
    """
    extent = _PLAIN_ACKS[version].match(data, at, at + ACKS_BYTES_MAX)
    if extent is None:
        return _scan_acks_with_more(data, at, version)
    end = extent.end()
    numbers = list(map(int, data[at:end].translate(_DIGITS_ONLY).split()))
    return AckRun(numbers[::3], numbers[1::3], numbers[2::3]), end


def _scan_acks_with_more(data: bytes, at: int, version: Version) -> tuple[AckRun, int] | None:
    """Like `scan_ack_frames`, for frames with a receipt or a subscription."""
    found = _ACKS[version].findall(data, at, at + ACKS_BYTES_MAX)
    if not found[-1][0]:
        found.pop()
    if not found:
        return None
    frames, subscriptions, queue_ids, offsets, receipts = zip(*found, strict=True)
    asking = [index for index, receipt in enumerate(receipts) if receipt]
    run = AckRun(
        list(map(int, subscriptions)),
        list(map(int, queue_ids)),
        list(map(int, offsets)),
        [receipts[index] for index in asking],
        asking,
    )
    return run, at + sum(map(len, frames))
