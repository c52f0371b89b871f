"""A tree of the patterns with ``+`` and ``#`` of one policy: finds the rules that cover a name or a filter in one walk.

The tree that routes messages (`martlet.delivery.routing`) has its filters by subscriber and finds all that match a
name. This one has one rule for each pattern, and a filter may be asked about.
"""

from collections.abc import Sequence
from typing import final

from martlet_acl.policy.rules import Rule

__all__ = ["PatternTree"]


@final
class _Node:
    """*here* is the rule whose pattern ends at the node, *below* the one that has a ``#`` after it."""

    __slots__ = ("below", "children", "here")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.here: Rule | None = None
        self.below: Rule | None = None


@final
class PatternTree:
    """Rules by the levels of their patterns."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root = _Node()

    def put(self, pattern: Sequence[str], rule: Rule) -> None:
        """Let *rule* be that of *pattern*."""
        node = self._root
        for level in pattern:
            if level == "#":
                node.below = rule
                return
            following = node.children.get(level)
            if following is None:
                following = node.children[level] = _Node()
            node = following
        node.here = rule

    def remove(self, pattern: Sequence[str]) -> None:
        """Remove the rule of *pattern*, which is there."""
        node = self._root
        path: list[tuple[_Node, str]] = []
        for level in pattern:
            if level != "#":
                path.append((node, level))
                node = node.children[level]
        if pattern[-1] == "#":
            node.below = None
        else:
            node.here = None
        while path and not node.children and node.here is None and node.below is None:
            node, level = path.pop()
            del node.children[level]

    def find(self, levels: Sequence[str], is_filter: bool) -> list[Rule]:
        """Return the rules that cover the name *levels*, or all names that this filter selects."""
        found: list[Rule] = []
        nodes = [self._root]
        for place, level in enumerate(levels):
            found += [node.below for node in nodes if node.below is not None]
            if is_filter and level == "#" and place == len(levels) - 1:
                return found
            # A level + of a filter is covered by + alone, which is its key.
            keys = ("+",) if level == "+" else (level, "+")
            nodes = [node.children[key] for node in nodes for key in keys if key in node.children]
            if not nodes:
                return found
        for node in nodes:
            found += [rule for rule in (node.below, node.here) if rule is not None]
        return found
