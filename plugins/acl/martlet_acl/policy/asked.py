"""A question, prepared so that it can be compared with the resources, actions and networks of many rules."""

from ipaddress import IPv4Address, IPv6Address
from typing import final

from msgspec.structs import replace

from martlet.access.networks import plain_address
from martlet.contracts import Question
from martlet_acl.policy.resources import CLUSTER, Resource
from martlet_acl.policy.rules import BITS, Rule

__all__ = ["Asked", "outer_question"]


@final
class Asked:
    """One question.

    The name of kind ``name`` is a topic filter unless the action is ``publish``: a resource covers a filter if it
    covers each name that the filter selects.

    Attributes:
      text: the resource whose only name is the one asked about.
      text_of_all: the resource that has all names of the kind.
      head: the longest text with which each selected name begins.
      levels: those of the name or filter of kind ``name``; none for other kinds.
      is_filter: the levels may be wildcards.
    """

    __slots__ = (
        "_address",
        "_address_text",
        "_bit",
        "head",
        "is_filter",
        "kind",
        "levels",
        "text",
        "text_of_all",
        "user",
    )

    def __init__(self, question: Question) -> None:
        self._address_text = question.address
        self._bit = BITS[question.action]
        self._address: IPv4Address | IPv6Address | None = None
        self.user = question.identity.name
        self.kind = question.kind
        self.head = name = question.name
        self.text_of_all = f"{question.kind}:*"
        self.levels: list[str] = []
        self.is_filter = False
        if question.kind == "name":
            self.is_filter = question.action != "publish" and ("+" in name or "#" in name)
            self.levels = levels = name.split("/")
            if self.is_filter:
                if len(levels) == 2 and levels[1] == "#":  # the same names: each has at least one level
                    self.levels = levels = [levels[0], "+", "#"]
                self.head = _head(levels)
        self.text = CLUSTER.text if question.kind == "cluster" else f"{question.kind}:{name}"

    def admits(self, rule: Rule) -> bool:
        """Whether *rule* is about the action and the client's address."""
        return bool(rule.actions & self._bit) and (not rule.networks or self.is_in_networks_of(rule))

    def has_action_of(self, rule: Rule) -> bool:
        """Whether *rule* is about the action."""
        return bool(rule.actions & self._bit)

    def is_in_networks_of(self, rule: Rule) -> bool:
        """Whether the client's address is in one of the networks of *rule*; the broker itself has no address."""
        if not rule.networks:
            return True
        if self._address is None:
            self._address = plain_address(self._address_text)
            if self._address is None:
                return False
        address = self._address
        return any(address in network for network in rule.networks)

    def is_covered_by(self, resource: Resource) -> bool:
        """Whether *resource* covers what is asked about; False if it has ``{user}`` in it."""
        if resource.text == "*":
            return True
        if resource.kind != self.kind or resource.is_template:
            return False
        match resource.form:
            case "any":
                return True
            case "literal":
                return resource.text == self.text
            case "prefix":
                return self.head.startswith(resource.name)
            case "wildcards":
                return self._is_selected(resource.name.split("/"))

    def _is_selected(self, pattern: list[str]) -> bool:
        """Whether *pattern* covers the levels."""
        levels = self.levels
        for place, wanted in enumerate(pattern):
            if wanted == "#":
                return True
            if place == len(levels) or (self.is_filter and levels[place] == "#" and place == len(levels) - 1):
                return False
            if wanted not in ("+", levels[place]):
                return False
        return len(pattern) == len(levels)


def outer_question(question: Question) -> Question | None:
    """Return the question that is asked before *question*: about the topic of a name."""
    if question.kind == "name":
        return replace(question, kind="topic", name=question.name.partition("/")[0])
    return None


def _head(levels: list[str]) -> str:
    """Return the longest text with which all names begin that the filter *levels* selects."""
    for place, level in enumerate(levels):
        if level == "+":
            return "/".join(levels[:place]) + "/"
        if level == "#" and place == len(levels) - 1:
            return "/".join(levels[:place])
    return "/".join(levels)
