"""Explanations of decisions: every rule of everybody concerned, and why it decides or not."""

from operator import itemgetter
from typing import Final, final

from msgspec import Struct

from martlet.contracts import Question, RuleLevel, Verdict
from martlet.runtime.steps import Budget, Steps, finish_now
from martlet_acl.policy.asked import Asked, outer_question
from martlet_acl.policy.policies import LEVELS, Policies, Standing, find, subjects_of, verdict_of
from martlet_acl.policy.policy import Precedence, precedence_of
from martlet_acl.policy.resources import expand, levels_of_user
from martlet_acl.policy.rules import Rule
from martlet_acl.policy.subjects import show_subject

__all__ = ["ConsideredRule", "Explanation", "explain", "explain_in_steps"]

COMPARE_US: Final = 8.0

DECIDES: Final = "decides"
OUTRANKED: Final = "matches, but another rule comes first"
UNREACHED: Final = "matches, but a custom rule decides"
OTHER_RESOURCE: Final = "other resource"
OTHER_ACTIONS: Final = "other actions"
OTHER_NETWORKS: Final = "other networks"


@final
class ConsideredRule(Struct, frozen=True):
    """A rule of a subject that the question concerns; *outcome* says whether it decides, and why not."""

    subject: str
    level: RuleLevel
    rule: Rule
    outcome: str

    def __str__(self) -> str:
        return f"{show_subject(self.subject)}, {self.level}: {self.rule}: {self.outcome}"


@final
class Explanation(Struct, frozen=True):
    """The verdict on one question, and the rules in the order in which they were considered.

    Args:
      opinion: what the rules say; None if none matches.
      verdict: the same, or a refusal with a reason. For a name inside a topic the topic is asked about first, and this
        is what follows from both.
      subjects: those whose rules count.
      of_topic: the explanation for the topic, if the question is about a name inside it.
    """

    question: Question
    opinion: Verdict | None
    verdict: Verdict
    subjects: tuple[str, ...] = ()
    rules: tuple[ConsideredRule, ...] = ()
    of_topic: "Explanation | None" = None

    @property
    def steps(self) -> tuple["Explanation", ...]:
        """The explanations of the questions that are asked one after the other, this one last."""
        return (self,) if self.of_topic is None else (self.of_topic, self)

    @property
    def decisive(self) -> "Explanation | None":
        """The step whose opinion is the verdict; None if no step has one."""
        first = self.of_topic
        if first is not None and first.opinion is not None and (self.opinion is None or not first.opinion.allowed):
            return first
        return self if self.opinion is not None else None


def explain(policies: Policies, question: Question) -> Explanation:
    """Return the verdict on *question* and how it comes about."""
    return finish_now(explain_in_steps(policies, question))


def explain_in_steps(policies: Policies, question: Question) -> Steps[Explanation]:
    """As `explain`, in slices; a change of the rules between them may be seen in part."""
    of_topic = None
    outer = outer_question(question)
    if outer is not None:
        of_topic = yield from explain_in_steps(policies, outer)
    standing = policies.standing_of(question.identity)
    if standing.verdict is not None:
        return Explanation(question, standing.verdict, standing.verdict, of_topic=of_topic)
    subjects = subjects_of(policies.members, question.identity)
    opinion, rules = yield from _consider(policies, standing, Asked(question), subjects)
    return Explanation(
        question, opinion, _combine(opinion, of_topic, subjects), tuple(subjects), tuple(rules), of_topic
    )


def _combine(opinion: Verdict | None, of_topic: Explanation | None, subjects: list[str]) -> Verdict:
    """Return the verdict of both questions, as the broker does."""
    first = of_topic.opinion if of_topic is not None else None
    if first is not None and (opinion is None or not first.allowed):
        return first
    if opinion is None:
        return Verdict(False, reason=f"no rule of {', '.join(map(show_subject, subjects))} matches")
    return opinion


def _consider(
    policies: Policies, standing: Standing, asked: Asked, subjects: list[str]
) -> Steps[tuple[Verdict | None, list[ConsideredRule]]]:
    """Return what the rules say, and all of them."""
    budget = Budget(COMPARE_US)
    opinion: Verdict | None = None
    considered: list[ConsideredRule] = []
    for number, level in enumerate(LEVELS):
        decisive = find(asked, standing, number)
        ordered: list[tuple[Precedence, ConsideredRule]] = []
        for subject in subjects:
            for rule in policies.rules_of(subject, level):
                precedence, mismatch = _compare(asked, rule)
                if mismatch or decisive is None:
                    outcome = mismatch
                elif opinion is not None:
                    outcome = UNREACHED
                else:
                    is_decisive = subject == decisive.subject and rule is decisive.rule
                    outcome = DECIDES if is_decisive else OUTRANKED
                ordered.append((precedence, ConsideredRule(subject, level, rule, outcome)))
                if budget.is_over():
                    yield
        considered += [each for _, each in sorted(ordered, key=itemgetter(0))]
        if opinion is None and decisive is not None:
            opinion = verdict_of(decisive, level)
    return opinion, considered


def _compare(asked: Asked, rule: Rule) -> tuple[Precedence, str]:
    """Return the precedence of *rule*, and why it does not match; empty if it does."""
    resource = rule.resource
    resources = expand(resource, levels_of_user(asked.user)) if resource.is_template else (resource,)
    ranks = [resource.rank for resource in resources if asked.is_covered_by(resource)]
    precedence = (min(ranks), rule.allow) if ranks else precedence_of(rule)
    if not ranks:
        return precedence, OTHER_RESOURCE
    if not asked.has_action_of(rule):
        return precedence, OTHER_ACTIONS
    return precedence, "" if asked.is_in_networks_of(rule) else OTHER_NETWORKS
