"""All rules and quotas of all subjects, and the decisions."""

from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping
from typing import Final, final, get_args

from msgspec import Struct

from martlet.contracts import Identity, Network, Question, Quota, RuleLevel, Verdict
from martlet_acl.policy.asked import Asked
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import Memberships, UserRecord
from martlet_acl.policy.policy import Policy, Precedence, precedence_of
from martlet_acl.policy.quotas import SubjectQuotas
from martlet_acl.policy.resources import Resource, expand, levels_of_user
from martlet_acl.policy.rules import Rule
from martlet_acl.policy.subjects import (
    ANONYMOUS,
    EVERYBODY,
    group_subject,
    parse_subject,
    show_subject,
    user_subject,
)

__all__ = ["LEVELS", "Found", "Policies", "subjects_of"]

RULES_MAX: Final = 1_000_000
# Users whose subjects are remembered: some 300 bytes each.
STANDINGS_MAX: Final = 20_000

LEVELS: Final[tuple[RuleLevel, ...]] = get_args(RuleLevel)


class Found(Struct, frozen=True, gc=False):
    """A rule that matches, and whose it is."""

    precedence: Precedence
    subject: str
    rule: Rule


class Standing(Struct, frozen=True):
    """What concerns one identity: a *verdict* that needs no rules, or by level its policies and templates.

    Changes of the policies themselves are seen through it; after other changes *generation* is not the newest any more.
    """

    generation: int
    verdict: Verdict | None = None
    policies: tuple[tuple[tuple[str, Policy], ...], ...] = ()
    templates: tuple[tuple[tuple[str, Rule, tuple[Resource, ...]], ...], ...] = ()


@final
class Policies:
    """Users, groups, rules and quotas; a `martlet.contracts.Decider`.

    After a change, call `Rules.changed` of the broker: it remembers decisions and quotas.
    """

    __slots__ = ("_count", "_generation", "_networks", "_standings", "_subjects", "members", "quotas")

    def __init__(self) -> None:
        self.members = Memberships()  # to read; change it by the methods below
        self.quotas = SubjectQuotas()
        self._subjects: dict[str, tuple[Policy, Policy]] = {}
        self._networks: dict[Network, int] = {}  # how many rules name it
        self._standings: dict[tuple[str, tuple[str, ...]], Standing] = {}
        # Incremented, and not all forgotten at once: that would take 15 ms for 10,000 of them.
        self._generation = 0
        self._count = 0

    @property
    def networks(self) -> KeysView[Network]:
        """The networks that rules name; a view that follows the changes."""
        return self._networks.keys()

    def __len__(self) -> int:
        return self._count

    def parts(self) -> list[object]:
        """Return what this consists of, so that its owner can drop it piece by piece, from the end: all at once takes
        long.
        """
        users, quotas = self.members.users.values(), self.quotas.parts()
        return [*self._subjects.values(), *users, *quotas, *self._standings.values()]

    @property
    def subject_count(self) -> int:
        """The number of subjects that have rules."""
        return len(self._subjects)

    def __iter__(self) -> Iterator[str]:
        """The subjects that have rules."""
        return iter(self._subjects)

    def put_user(self, name: str, user: UserRecord) -> None:
        """Add or replace a user. Raises `PolicyError`."""
        self.members.put_user(name, user)
        self._generation += 1

    def remove_user(self, name: str) -> None:
        """Remove a user, who keeps his rules: `remove_subject` removes them."""
        self.members.users.pop(name, None)
        self._generation += 1

    def put_group(self, name: str, groups: Iterable[str]) -> None:
        """Let the group *name* be in *groups*, and in no others. Raises `PolicyError`, also for a cycle."""
        self.put_groups({name: tuple(groups)})

    def put_groups(self, groups: Mapping[str, tuple[str, ...]]) -> None:
        """Do `put_group` for each of *groups*, or raise `PolicyError` and change nothing."""
        self.members.put_groups(groups)
        self._generation += 1

    def remove_group(self, name: str) -> None:
        """Let the group *name* be in no other group; its users and rules stay."""
        self.members.groups.pop(name, None)
        self._generation += 1

    def rules_of(self, subject: str, level: RuleLevel) -> list[Rule]:
        """Return the rules of *subject*, in the order in which they were added."""
        policies = self._subjects.get(subject)
        return policies[LEVELS.index(level)].all() if policies is not None else []

    def rule_on(self, subject: str, level: RuleLevel, resource: str) -> Rule | None:
        """Return the rule of *subject* on *resource*, as the rule has it; None if there is none."""
        policies = self._subjects.get(subject)
        return policies[LEVELS.index(level)].get(resource) if policies is not None else None

    def put_rule(self, subject: str, level: RuleLevel, rule: Rule) -> None:
        """Add *rule*, which replaces the one about the same resource. Raises `PolicyError`."""
        policies = self._subjects.get(subject)
        if policies is None:
            parse_subject(subject)
            policies = Policy(), Policy()
        policy = policies[LEVELS.index(level)]
        if rule.resource.is_template and subject == ANONYMOUS:
            raise PolicyError(f"resource {rule.resource.text!r} has {{user}}, but {ANONYMOUS} clients have no name")
        if self._count >= RULES_MAX and policy.get(rule.resource.text) is None:
            raise PolicyError(f"there are {RULES_MAX} rules already")
        if not policy.rules or rule.resource.is_template:
            self._generation += 1
        old = policy.put(rule)
        self._subjects[subject] = policies
        self._count += old is None
        self._note_networks(rule, old)

    def remove_rule(self, subject: str, level: RuleLevel, resource: str) -> Rule | None:
        """Remove the rule about *resource* and return it; None if there is none."""
        policies = self._subjects.get(subject)
        if policies is None:
            return None
        policy = policies[LEVELS.index(level)]
        old = policy.remove(resource)
        if old is None:
            return None
        self._count -= 1
        self._note_networks(None, old)
        if not policy or old.resource.is_template:
            self._generation += 1
        if not any(policies):
            del self._subjects[subject]
        return old

    def quotas_of(self, identity: Identity) -> list[Quota]:
        """Return the quotas of *identity*, a `martlet.contracts.QuotaSource`: its own, and those of all its groups."""
        return self.quotas.of(subjects_of(self.members, identity)) if self.quotas else []

    def remove_subject(self, subject: str) -> None:
        """Remove the rules and the quota of *subject*."""
        self.quotas.remove(subject)
        self.remove_rules(subject)

    def remove_rules(self, subject: str) -> None:
        """Remove all rules of *subject*."""
        for policy in self._subjects.pop(subject, ()):
            self._count -= len(policy)
            self._forget_networks(Counter(network for rule in policy for network in rule.networks))
        self._generation += 1

    def decide(self, question: Question) -> Verdict | None:
        """Return the verdict of the rules; None if none of them matches."""
        standing = self.standing_of(question.identity)
        if standing.verdict is not None:
            return standing.verdict
        found, level = self._find(question, standing)
        return verdict_of(found, level) if found is not None else None

    def find(self, question: Question) -> tuple[Found | None, RuleLevel]:
        """Return the rule that decides, and its level; None if no rule does."""
        return self._find(question, self.standing_of(question.identity))

    def _find(self, question: Question, standing: Standing) -> tuple[Found | None, RuleLevel]:
        asked = Asked(question)
        found: Found | None = None
        for number, level in enumerate(LEVELS) if standing.verdict is None else ():
            found = find(asked, standing, number)
            if found is not None:
                return found, level
        return None, LEVELS[-1]

    def standing_of(self, identity: Identity) -> Standing:
        """Return what concerns *identity*."""
        key = (identity.name, identity.groups)
        standing = self._standings.get(key)
        if standing is None or standing.generation != self._generation:
            if standing is None and len(self._standings) >= STANDINGS_MAX:
                del self._standings[next(iter(self._standings))]
            standing = self._standings[key] = self._make_standing(identity)
        return standing

    def _make_standing(self, identity: Identity) -> Standing:
        user = self.members.users.get(identity.name) if identity.name else None
        if user is not None and user.disabled:
            return Standing(
                self._generation, Verdict(False, f"user {identity.name} is disabled", "the user is disabled")
            )
        if user is not None and user.administrator:
            return Standing(self._generation, Verdict(True, f"user {identity.name} is an administrator"))
        spellings = levels_of_user(identity.name)
        subjects = [each for each in subjects_of(self.members, identity) if each in self._subjects]
        policies: list[tuple[tuple[str, Policy], ...]] = []
        templates: list[tuple[tuple[str, Rule, tuple[Resource, ...]], ...]] = []
        for number in range(len(LEVELS)):
            having = [(subject, self._subjects[subject][number]) for subject in subjects]
            policies.append(tuple(each for each in having if each[1].rules))
            templates.append(
                tuple(
                    (subject, rule, expand(rule.resource, spellings))
                    for subject, policy in having
                    for rule in policy.templates.values()
                )
            )
        return Standing(self._generation, policies=tuple(policies), templates=tuple(templates))

    def _note_networks(self, added: Rule | None, removed: Rule | None) -> None:
        for network in added.networks if added is not None else ():
            self._networks[network] = self._networks.get(network, 0) + 1
        if removed is not None:
            self._forget_networks(dict.fromkeys(removed.networks, 1))

    def _forget_networks(self, counts: Mapping[Network, int]) -> None:
        """Count *counts* less rules that name a network."""
        for network, count in counts.items():
            self._networks[network] -= count
            if not self._networks[network]:
                del self._networks[network]


def subjects_of(members: Memberships, identity: Identity) -> list[str]:
    """Return the subjects whose rules and quotas concern *identity*: itself, its groups, everybody."""
    groups = [group_subject(group) for group in members.groups_of(identity.name, identity.groups)]
    if not identity.name:
        return [ANONYMOUS, *groups]
    return [user_subject(identity.name), *groups, EVERYBODY]


def find(asked: Asked, standing: Standing, number: int) -> Found | None:
    """Return the rule that decides among those of the level *number*."""
    best: Found | None = None
    for subject, policy in standing.policies[number]:
        rule = policy.find(asked)
        if rule is not None and (best is None or precedence_of(rule) < best.precedence):
            best = Found(precedence_of(rule), subject, rule)
    for subject, rule, resources in standing.templates[number]:
        if not asked.admits(rule):
            continue
        for resource in resources:
            if asked.is_covered_by(resource) and (best is None or (resource.rank, rule.allow) < best.precedence):
                best = Found((resource.rank, rule.allow), subject, rule)
    return best


def verdict_of(found: Found, level: RuleLevel) -> Verdict:
    """Return the verdict of a rule."""
    rule = f"{show_subject(found.subject)}, {level}: {found.rule}"
    return Verdict(True, rule) if found.rule.allow else Verdict(False, rule, "a rule denies it")
