"""A tree of topic filters that finds all filters matching a name in one walk over its levels.

Levels that no other filter shares are not nodes of their own: a node's *label* has all levels between it and the node
above. So a filter adds at most two nodes, however many levels it has.

    a/b/c/d/e, a/b/x/+/y        "a", label "b/"  ->  "c", label "d/e/"
                                                     "x", label "+/y/"
"""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeAlias, TypeVar, final

__all__ = ["FilterTree", "FilterWalk", "Stored", "Table"]

T = TypeVar("T", bound=Hashable)

Table: TypeAlias = dict[T, Hashable]  # the subscribers of one filter, with their values
# A dict of one entry takes four times as many bytes as a pair.
Stored: TypeAlias = Table[T] | tuple[T, Hashable]


def _with_subscriber(stored: Stored[T] | None, subscriber: T, value: Hashable) -> Stored[T]:
    if isinstance(stored, dict):
        stored[subscriber] = value
        return stored
    if stored is None or stored[0] == subscriber:
        return subscriber, value
    return {stored[0]: stored[1], subscriber: value}


def _without_subscriber(stored: Stored[T], subscriber: T) -> Stored[T] | None:
    if not isinstance(stored, dict):
        return None
    del stored[subscriber]
    return stored or None


def _has_subscriber(stored: Stored[T] | None, subscriber: T) -> bool:
    if isinstance(stored, dict):
        return subscriber in stored
    return stored is not None and stored[0] == subscriber


@final
class _Node(Generic[T]):
    """A node of the tree.

    *here* are the subscribers of the filter that ends at the node, *rest* those of the filter with a final wildcard
    after it. The first level of each child is its key in *children*, or the single-level wildcard for *one*; the other
    levels are its *label*, with a separator after each.
    """

    __slots__ = ("children", "here", "label", "one", "rest")

    def __init__(self, label: str) -> None:
        self.label = label
        self.children: dict[str, _Node[T]] | None = None
        self.one: _Node[T] | None = None
        self.here: Stored[T] | None = None
        self.rest: Stored[T] | None = None

    def take(self, other: "_Node[T]") -> None:
        """Take over everything below the label of *other*."""
        self.children, self.one, self.here, self.rest = other.children, other.one, other.here, other.rest

    def only_child(self) -> "tuple[str | None, _Node[T]] | None":
        """Return the first level, None for the wildcard, and the node of the only child; None if not one child."""
        if self.one is not None:
            return None if self.children else (None, self.one)
        if self.children is not None and len(self.children) == 1:
            return next(iter(self.children.items()))
        return None


@final
class FilterWalk(Generic[T]):
    """A walk that finds the filters matching a name; ``tables`` has the subscribers of each.

    ``branches`` are branches to visit, each with the place in ``text`` where its label begins. Filters may be added and
    removed between two parts of a walk: a node keeps the place where its label begins, so the walk finds all filters
    that stay.

    ``last`` is where the last level of ``text`` begins. The walk ``reads_last`` once it may have compared that level
    with one of a filter that is no wildcard. If it never does, the same filters match all names that differ only there.
    """

    __slots__ = ("branches", "last", "reads_last", "tables", "text")

    def __init__(self, text: str, branches: list[tuple[_Node[T], int]], last: int = 0) -> None:
        self.text = text
        self.branches = branches
        self.last = last
        self.reads_last = not last  # the first level of a name may be hidden
        self.tables: list[Stored[T]] = []


@final
class FilterTree(Generic[T]):
    """Filters with their subscribers; `route_cache.RouteCache` explains the arguments.

    The methods take a filter as its levels. A filter always has the same place among matching ones, so equal sets of
    filters are found in the same order for all names.
    """

    def __init__(self, separator: str, one: str, rest: str, hidden: str, *, rest_takes_none: bool = True) -> None:
        self._rest_takes_none = rest_takes_none
        self._separator = separator
        self._one = one
        self._rest = rest
        self._hidden = hidden
        self._root: _Node[T] = _Node("")
        self.steps = 0  # steps of all walks: nodes and wildcards visited, and filters that matched

    # labels

    def _label_of(self, levels: Sequence[str]) -> str:
        return self._separator.join((*levels, ""))

    def _levels_of(self, label: str) -> list[str]:
        return label.split(self._separator)[:-1]

    # filters

    def add(self, levels: Sequence[str], subscriber: T, value: Hashable) -> bool:
        """Subscribe *subscriber* with *value*; return whether it is new."""
        has_rest = levels[-1] == self._rest
        node = self._node_for(levels[:-1] if has_rest else levels)
        stored = node.rest if has_rest else node.here
        is_new = not _has_subscriber(stored, subscriber)
        if has_rest:
            node.rest = _with_subscriber(stored, subscriber, value)
        else:
            node.here = _with_subscriber(stored, subscriber, value)
        return is_new

    def _node_for(self, levels: Sequence[str]) -> _Node[T]:
        """Return the node at the end of *levels*, created if missing."""
        node, index, count = self._root, 0, len(levels)
        while index < count:
            level = levels[index]
            index += 1
            child = self._child(node, level)
            if child is None:
                child = _Node(self._label_of(levels[index:]))
                self._attach(node, level, child)
                return child
            if child.label:
                label_levels = self._levels_of(child.label)
                common = _count_common(label_levels, levels, index)
                index += common
                if common < len(label_levels):
                    self._split(child, label_levels, common)
            node = child
        return node

    def _child(self, node: _Node[T], level: str) -> _Node[T] | None:
        if level == self._one:
            return node.one
        return node.children.get(level) if node.children is not None else None

    def _attach(self, node: _Node[T], level: str, child: _Node[T]) -> None:
        if level == self._one:
            node.one = child
        elif node.children is None:
            node.children = {level: child}
        else:
            node.children[level] = child

    def _detach(self, node: _Node[T], level: str) -> None:
        if level == self._one:
            node.one = None
        elif node.children is not None:
            del node.children[level]
            if not node.children:
                node.children = None

    def _split(self, node: _Node[T], label_levels: list[str], count: int) -> None:
        """End the label of *node*, whose levels are *label_levels*, after *count* of them; a new node gets the rest."""
        below: _Node[T] = _Node(self._label_of(label_levels[count + 1 :]))
        below.take(node)
        node.label = self._label_of(label_levels[:count])
        node.children = node.one = node.here = node.rest = None
        self._attach(node, label_levels[count], below)

    def remove(self, levels: Sequence[str], subscriber: T) -> bool:
        """Remove *subscriber*; return False if it was not subscribed."""
        has_rest = levels[-1] == self._rest
        path: list[tuple[_Node[T], str]] = []
        node = self._find_node(levels[:-1] if has_rest else levels, path)
        if node is None:
            return False
        stored = node.rest if has_rest else node.here
        if stored is None or not _has_subscriber(stored, subscriber):
            return False
        if has_rest:
            node.rest = _without_subscriber(stored, subscriber)
        else:
            node.here = _without_subscriber(stored, subscriber)
        self._merge_or_remove(node, path)
        return True

    def _find_node(self, levels: Sequence[str], path: list[tuple[_Node[T], str]]) -> _Node[T] | None:
        """Return the node at the end of *levels*; *path* gets the nodes above it, each with the level that follows."""
        node, index, count = self._root, 0, len(levels)
        while index < count:
            level = levels[index]
            index += 1
            child = self._child(node, level)
            if child is None:
                return None
            if child.label:
                label_levels = self._levels_of(child.label)
                if _count_common(label_levels, levels, index) < len(label_levels):
                    return None
                index += len(label_levels)
            path.append((node, level))
            node = child
        return node

    def _merge_or_remove(self, node: _Node[T], path: list[tuple[_Node[T], str]]) -> None:
        """Remove *node* if it is empty; merge it with its only child if it has no other purpose."""
        if node.here is None and node.rest is None and node.children is None and node.one is None and path:
            parent, level = path.pop()
            self._detach(parent, level)
            node = parent
        if not path or node.here is not None or node.rest is not None:
            return
        only_child = node.only_child()
        if only_child is not None:
            literal, child = only_child
            child_level = self._one if literal is None else literal
            node.label = self._label_of([*self._levels_of(node.label), child_level, *self._levels_of(child.label)])
            node.take(child)

    # names

    def begin(self, name: str) -> FilterWalk[T]:
        """Return a walk that finds the filters which match *name*."""
        text = name + self._separator  # so that each level ends with a separator
        last = name.rfind(self._separator) + len(self._separator) if self._separator in name else 0
        if not self._hidden or not name.startswith(self._hidden):
            return FilterWalk(text, [(self._root, 0)], last)
        level_end = text.find(self._separator)  # no wildcard matches the first level
        children = self._root.children
        child = children.get(text[:level_end]) if children is not None else None
        return FilterWalk(text, [(child, level_end + len(self._separator))] if child is not None else [], last)

    def go_on(self, walk: FilterWalk[T], steps_max: int = 1 << 62) -> bool:
        """Continue *walk* for about *steps_max* steps; return whether it has found all matching filters."""
        separator, text, branches, tables = self._separator, walk.text, walk.branches, walk.tables
        step, size, tables_before, steps = len(separator), len(text), len(tables), 0
        limit = steps_max + tables_before
        while branches and steps + len(tables) < limit:
            node, start = branches.pop()
            while True:
                steps += 1
                label = node.label
                if label:
                    if not walk.reads_last:
                        walk.reads_last = self._reads_last(label, text, start, walk.last)
                    if text.startswith(label, start):
                        start += len(label)
                    else:
                        steps += label.count(self._one)
                        start = self._match_label(label, text, start)
                        if start < 0:
                            break
                if start == size and node.here is not None:
                    tables.append(node.here)
                if node.rest is not None and (start < size or self._rest_takes_none):
                    tables.append(node.rest)
                if start == size:
                    break
                end = text.find(separator, start)
                if node.one is not None:
                    branches.append((node.one, end + step))
                if node.children is None:
                    break
                if start == walk.last:
                    walk.reads_last = True
                child = node.children.get(text[start:end])
                if child is None:
                    break
                node, start = child, end + step
        self.steps += steps + len(tables) - tables_before
        return not branches

    def _reads_last(self, label: str, text: str, start: int, last: int) -> bool:
        """Return whether *label*, at *start* of *text*, has no wildcard for the level that begins at *last*."""
        levels, index = label.split(self._separator), text.count(self._separator, start, last)
        return index < len(levels) - 1 and levels[index] != self._one

    def _match_label(self, label: str, text: str, start: int) -> int:
        """Return the end of the levels of *text* from *start* on that *label* matches; -1 if it does not match."""
        if text.startswith(label, start):
            return start + len(label)
        if self._one not in label:
            return -1
        separator = self._separator
        step = len(separator)
        for index, literal in enumerate(label.split(self._one + separator)):
            if index:
                start = text.find(separator, start) + step
                if start < step:
                    return -1
            if not text.startswith(literal, start):
                return -1
            start += len(literal)
        return start


def _count_common(label_levels: Sequence[str], levels: Sequence[str], start: int) -> int:
    """Return the number of levels that *label_levels* and *levels* from *start* on have in common."""
    count = min(len(label_levels), len(levels) - start)
    for index in range(count):
        if label_levels[index] != levels[start + index]:
            return index
    return count
