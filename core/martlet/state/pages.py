"""A table for the state of a projection that can be frozen without copying it.

A `dict` of 100,000 entries takes 0.6 to 2 ms to copy, a `dict` of a million ten times as long. Here the entries are in
pages. A frozen view shares them with the table, and the first change of a page after a freeze copies the page.
"""

from collections.abc import Iterator
from typing import Final, Generic, TypeVar, final, overload

__all__ = ["Pages"]

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

PAGE_ENTRIES: Final = 512  # copying a page takes 3 us


@final
class Pages(Generic[K, V]):
    """Entries by key, in the order in which their keys were added, as in a `dict`.

    Do not modify values in place: replace them by changed copies.
    """

    def __init__(self) -> None:
        self._page_of: dict[K, int] = {}
        self._pages: dict[int, dict[K, V]] = {}  # by number, ascending; no page is empty
        self._unshared: set[int] = set()  # pages that no frozen view shares
        self._newest = 0  # the number of the page that takes new keys

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, key: K) -> bool:
        return key in self._page_of

    def __getitem__(self, key: K) -> V:
        return self._pages[self._page_of[key]][key]

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: D | None = None) -> V | D | None:
        """Return the value of *key*, or *default*."""
        number = self._page_of.get(key)
        return default if number is None else self._pages[number][key]

    def __setitem__(self, key: K, value: V) -> None:
        number = self._page_of.get(key)
        if number is None:
            number = self._page_of[key] = self._page_with_room()
        self._page_to_change(number)[key] = value

    def __delitem__(self, key: K) -> None:
        self._pop_from(self._page_of.pop(key), key)

    def pop(self, key: K) -> V | None:
        """Remove *key* and return its value; None if there is none."""
        number = self._page_of.pop(key, None)
        return None if number is None else self._pop_from(number, key)

    def _pop_from(self, number: int, key: K) -> V:
        page = self._page_to_change(number)
        value = page.pop(key)
        if not page:
            del self._pages[number]
            self._unshared.discard(number)
        return value

    def __iter__(self) -> Iterator[K]:
        return iter(self._page_of)

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield the entries; the table must not change meanwhile."""
        for page in self._pages.values():
            yield from page.items()

    def values(self) -> Iterator[V]:
        """Yield the values; the table must not change meanwhile."""
        for page in self._pages.values():
            yield from page.values()

    def freeze(self) -> Iterator[tuple[K, V]]:
        """Return an iterator over the current entries, whatever changes later; takes 1 us per 10,000 entries."""
        pages = list(self._pages.values())
        self._unshared = set()
        return (entry for page in pages for entry in page.items())

    def _page_with_room(self) -> int:
        page = self._pages.get(self._newest)
        if page is None or len(page) >= PAGE_ENTRIES:
            self._newest += 1
            self._pages[self._newest] = {}
            self._unshared.add(self._newest)
        return self._newest

    def _page_to_change(self, number: int) -> dict[K, V]:
        page = self._pages[number]
        if number not in self._unshared:
            page = self._pages[number] = page.copy()
            self._unshared.add(number)
        return page
