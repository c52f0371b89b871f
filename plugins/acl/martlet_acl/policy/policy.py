"""The rules of one subject of one policy, one for each resource, and the search for the one that decides.

A rule is found by the text of its resource: the text asked about is that of the literal one. Its beginnings, of the
lengths that prefixes here have, are those of prefixes. Only patterns with ``+`` and ``#`` need a tree. The lengths and
the tree are computed at the first question, and follow each change from then on.
"""

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias, final

from martlet_acl.policy.asked import Asked
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.patterns import PatternTree
from martlet_acl.policy.resources import ANYTHING, Rank
from martlet_acl.policy.rules import Rule

__all__ = ["Policy", "Precedence", "precedence_of"]

RULES_MAX: Final = 10_000
# Rules with {user}: each is compared with every name that is asked about.
TEMPLATES_MAX: Final = 100

# The least decides: by the rank of the resource; then deny before allow.
Precedence: TypeAlias = tuple[Rank, bool]


def precedence_of(rule: Rule) -> Precedence:
    """Return the precedence of *rule* among rules that match."""
    return (rule.resource.rank, rule.allow)


@final
class Policy:
    """Rules by the text of their resource; *templates* are those with ``{user}``."""

    __slots__ = ("_lengths", "_order", "_tree", "rules", "templates")

    def __init__(self) -> None:
        self.rules: dict[str, Rule] = {}
        self.templates: dict[str, Rule] = {}
        self._order: dict[str, None] = {}  # the texts of all, in the order of the file; empty without templates
        # By kind the lengths of prefixes, the longest first; None before the first question.
        self._lengths: dict[str, list[int]] | None = None
        self._tree: PatternTree | None = None

    def __len__(self) -> int:
        return len(self.rules) + len(self.templates)

    def all(self) -> list[Rule]:
        """Return all rules as they were added; also called in a worker thread while this one changes."""
        if not self._order:
            return [*self.rules.values()]
        rules = {**self.rules, **self.templates}
        return [rules[text] for text in [*self._order] if text in rules]

    def __iter__(self) -> Iterator[Rule]:
        yield from self.rules.values()
        yield from self.templates.values()

    def get(self, text: str) -> Rule | None:
        """Return the rule about the resource *text*."""
        return self.rules.get(text) or self.templates.get(text)

    def put(self, rule: Rule) -> Rule | None:
        """Add *rule*; return the one about the same resource that it replaces. Raises `PolicyError`."""
        text = rule.resource.text
        table = self.templates if rule.resource.is_template else self.rules
        old = table.get(text)
        if old is None:
            if len(self) >= RULES_MAX:
                raise PolicyError(f"there would be more than {RULES_MAX} rules")
            if rule.resource.is_template and len(table) >= TEMPLATES_MAX:
                raise PolicyError(f"there would be more than {TEMPLATES_MAX} rules with {{user}}")
        if rule.resource.is_template and not self._order:
            self._order = dict.fromkeys(self.rules)
        table[text] = rule
        if self._order or rule.resource.is_template:
            self._order[text] = None
        if self._lengths is not None and not rule.resource.is_template:
            self._compile(self._lengths, rule)
        return old

    def remove(self, text: str) -> Rule | None:
        """Remove the rule about the resource *text* and return it; None if there is none."""
        rule = self.rules.pop(text, None) or self.templates.pop(text, None)
        self._order.pop(text, None)
        if rule is not None and self._tree is not None and is_in_tree(rule):
            self._tree.remove(rule.resource.name.split("/"))
        return rule

    def find(self, asked: Asked) -> Rule | None:
        """Return the first of the rules without ``{user}`` that match."""
        if self._lengths is None:
            self._lengths = {}
            for rule in self.rules.values():
                self._compile(self._lengths, rule)
        rules = self.rules
        found = rules.get(asked.text)
        if found is not None and found.resource.form == "literal" and asked.admits(found):
            return found
        best = self._find_prefix(self._lengths.get(asked.kind, ()), asked)
        if self._tree is not None and asked.levels:
            for rule in self._tree.find(asked.levels, asked.is_filter):
                if asked.admits(rule) and (best is None or precedence_of(rule) < precedence_of(best)):
                    best = rule
        if best is None:
            for text in (asked.text_of_all, ANYTHING.text):
                found = rules.get(text)
                if found is not None and asked.admits(found):
                    return found
        return best

    def _find_prefix(self, lengths: Sequence[int], asked: Asked) -> Rule | None:
        """Return the rule with the longest prefix that matches."""
        for length in lengths:
            if length <= len(asked.head):
                rule = self.rules.get(f"{asked.kind}:{asked.head[:length]}*")
                if rule is not None and asked.admits(rule):
                    return rule
        return None

    def _compile(self, lengths: dict[str, list[int]], rule: Rule) -> None:
        """Let `find` find *rule*, which has no ``{user}``."""
        resource = rule.resource
        if is_in_tree(rule):
            if self._tree is None:
                self._tree = PatternTree()
            self._tree.put(resource.name.split("/"), rule)
        elif resource.form == "prefix":
            # A length stays when its last prefix is removed: it costs one look-up in vain.
            ordered = lengths.setdefault(resource.kind, [])
            if (length := len(resource.name)) not in ordered:
                ordered.append(length)
                ordered.sort(reverse=True)


def is_in_tree(rule: Rule) -> bool:
    """Whether `find` finds *rule* by the tree of patterns."""
    return rule.resource.form == "wildcards" and not rule.resource.is_template
