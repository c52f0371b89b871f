"""Decides about requests by the rules, or only observes them (`martlet.contracts.Decider`)."""

from collections.abc import Callable, Collection
from typing import final

from msgspec.structs import replace

from martlet.contracts import Network, Question, Verdict
from martlet_acl.policy.asked import outer_question
from martlet_acl.policy.policies import Policies
from martlet_acl.state import AclState

__all__ = ["RuleAuthorizer"]

NO_RULE = Verdict(allowed=True, reason="no rule allows it", observed=True)


@final
class RuleAuthorizer:
    """Asks the rules of the *state* of this moment."""

    def __init__(self, state: Callable[[], AclState]) -> None:
        self._state = state

    @property
    def networks(self) -> Collection[Network]:
        """The networks that rules name."""
        return self._state().policies.networks

    def decide(self, question: Question) -> Verdict | None:
        """Return the verdict of the rules; None if none of them matches.

        There is none about all shared groups together, which the core asks about before each of them: the rule that
        matches fewer groups decides.
        """
        if question.kind == "shared" and not question.name:
            return None
        state = self._state()
        if not state.observe:
            return state.policies.decide(question)
        opinion = _opinion(state.policies, question)
        if opinion is None:
            return NO_RULE
        return opinion if opinion.allowed else replace(opinion, allowed=True, observed=True)


def _opinion(policies: Policies, question: Question) -> Verdict | None:
    """Return the verdict on *question* as it comes about when rules are enforced.

    The core asks about a name's topic first, and does not ask about the name if that is denied.
    """
    outer = outer_question(question)
    before = policies.decide(outer) if outer is not None else None
    if before is not None and not before.allowed:
        return before
    return policies.decide(question) or before
