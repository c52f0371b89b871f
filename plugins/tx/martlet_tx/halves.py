"""Pending transactions: one byte for each half message, in pages; a page without pending transactions is dropped.

A byte is 0 if the transaction has ended, else 1 plus the number of checks. No more is kept: the log position of a half
message is in the consume queue, and its content is in the record.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, final

from martlet.state import Pages

__all__ = ["CHECKS_MAX", "PAGE", "Halves", "OpBlocks", "Row"]

PAGE: Final = 1024  # half messages in a page
CHECKS_MAX: Final = 254
EMPTY: Final = bytes(PAGE)
UNCHECKED: Final = b"\x01" * PAGE
# Op records in a block at first; also the number of blocks at which each two are merged.
BLOCK: Final = 256
BLOCKS_MAX: Final = 4096

# A page: log position and store time of its first half message, bytes.
Page: TypeAlias = tuple[int, int, bytes]
Row: TypeAlias = tuple[int, Page]  # (number of the page, page)


@final
class Halves:
    """The pending transactions by the offset of their half message; ``next`` is the offset after the newest one."""

    def __init__(self) -> None:
        self._pages: Pages[int, Page] = Pages()  # by number, ascending
        self.next = 0
        self.pending = 0

    def add(self, offset: int, position: int, store_ms: int, checks: int = 0) -> None:
        """Add the half message at *offset*, which is greater than all before it."""
        number = offset // PAGE
        page = self._pages.get(number)
        self._set(number, page or (position, store_ms, EMPTY), offset % PAGE, 1 + min(checks, CHECKS_MAX))
        self.pending += 1
        self.next = offset + 1

    def add_all(self, offset: int, count: int, position: int, store_ms: int) -> None:
        """Add *count* half messages from *offset* on, unchecked and in one page; the first has *position*."""
        number, at = divmod(offset, PAGE)
        first, first_ms, data = self._pages.get(number, (position, store_ms, EMPTY))
        self._pages[number] = first, first_ms, b"%b%b%b" % (data[:at], UNCHECKED[:count], data[at + count :])
        self.pending += count
        self.next = offset + count

    def _set(self, number: int, page: Page, at: int, value: int) -> None:
        position, store_ms, data = page
        changed = b"%b%c%b" % (data[:at], value, data[at + 1 :])
        if changed != EMPTY:
            self._pages[number] = position, store_ms, changed
        else:
            del self._pages[number]

    def checks(self, offset: int) -> int:
        """Return the number of checks of the transaction of the half message at *offset*; -1 if it is not pending."""
        page = self._pages.get(offset // PAGE)
        return page[2][offset % PAGE] - 1 if page is not None else -1

    def set_checks(self, offset: int, checks: int) -> None:
        """Set the number of checks of a transaction, if it is pending."""
        page = self._pages.get(offset // PAGE)
        if page is not None and page[2][offset % PAGE]:
            self._set(offset // PAGE, page, offset % PAGE, 1 + min(checks, CHECKS_MAX))

    def end(self, offset: int) -> bool:
        """End the transaction of the half message at *offset*; return whether it was pending."""
        number, at = divmod(offset, PAGE)
        page = self._pages.get(number)
        if page is None or not page[2][at]:
            return False
        self._set(number, page, at, 0)
        self.pending -= 1
        return True

    def end_all(self, offsets: Sequence[int]) -> None:
        """End the transactions of the half messages at *offsets*; ignore transactions that are not pending."""
        number, data, page = -1, bytearray(), None
        for offset in offsets:
            if offset // PAGE != number:
                self._replace(number, page, data)
                number = offset // PAGE
                page = self._pages.get(number)
                data = bytearray(page[2] if page is not None else EMPTY)
            at = offset % PAGE
            if data[at]:
                data[at] = 0
                self.pending -= 1
        self._replace(number, page, data)

    def _replace(self, number: int, page: Page | None, data: bytearray) -> None:
        if page is None:
            return
        if data != EMPTY:
            self._pages[number] = page[0], page[1], bytes(data)
        else:
            del self._pages[number]

    def end_before(self, offset: int) -> None:
        """End all transactions whose half messages are before *offset*."""
        while self.pending and (first := self.first()) < offset:
            number = first // PAGE
            for each in self.pending_in(number):
                if each < offset:
                    self.end(each)

    def first(self) -> int:
        """Return the offset of the oldest pending half message; ``next`` if none is pending."""
        for number in self._pages:
            return number * PAGE + PAGE - len(self._pages[number][2].lstrip(b"\x00"))
        return self.next

    def pages(self, start: int = 0) -> list[int]:
        """Return the numbers of the pages from *start* on that have pending half messages, ascending."""
        return [number for number in self._pages if number >= start]

    def pending_in(self, number: int) -> list[int]:
        """Return the offsets of the pending half messages of page *number*, ascending."""
        page = self._pages.get(number)
        base = number * PAGE
        return [base + at for at, value in enumerate(page[2]) if value] if page is not None else []

    def floor(self) -> tuple[int, int] | None:
        """Return a log position and a store time at or before all pending half messages; None if none is pending."""
        for number in self._pages:
            position, store_ms, _ = self._pages[number]
            return position, store_ms
        return None

    def freeze(self) -> Iterator[Row]:
        """Return the rows of a snapshot, which later changes do not affect."""
        return self._pages.freeze()

    def restore(self, number: int, position: int, store_ms: int, data: bytes) -> None:
        """Add a page of a snapshot; call it in the order of `freeze`."""
        self._pages[number] = position, store_ms, data
        self.pending += PAGE - data.count(0)


@final
class OpBlocks:
    """Op records in blocks: find the first one that RocketMQ must read to know all ends from a half message on.

    A block is the offset of its first op record and the highest half message that its op records name.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int]] = []
        self._size = BLOCK
        self._in_last = 0
        self.next = 0  # the offset after the newest op record

    def add(self, offset: int, highest: int) -> None:
        """Add the op record at *offset*, which names half messages up to *highest*."""
        if not self._blocks or self._in_last >= self._size:
            self._blocks.append((offset, highest))
            self._in_last = 0
            if len(self._blocks) > BLOCKS_MAX:
                self._halve()
        elif highest > self._blocks[-1][1]:
            self._blocks[-1] = (self._blocks[-1][0], highest)
        self._in_last += 1
        self.next = offset + 1

    def _halve(self) -> None:
        blocks = self._blocks
        pairs = zip(blocks[0::2], [*blocks[1::2], (0, -1)], strict=False)
        self._blocks = [(first[0], max(first[1], second[1])) for first, second in pairs]
        self._size *= 2
        self._in_last = 1 if len(blocks) % 2 else self._size // 2

    def drop_before(self, half: int) -> None:
        """Forget the oldest blocks without a half message from *half* on."""
        count = 0
        for _, highest in self._blocks:
            if highest >= half:
                break
            count += 1
        del self._blocks[:count]

    def first_with(self, half: int) -> int:
        """Return the offset of an op record; none before it names a half message from *half* on."""
        return next((offset for offset, highest in self._blocks if highest >= half), self.next)

    def freeze(self) -> list[tuple[int, int]]:
        return list(self._blocks)

    def restore(self, blocks: Iterable[Sequence[int]], following: int) -> None:
        """Replace the state by the blocks of a snapshot, in lists; the next op record is *following*."""
        self._blocks = [(block[0], block[1]) for block in blocks]
        self._size = BLOCK
        self._in_last = BLOCK
        self.next = following
