"""What is explained, what is observed and what a client gets: all the same, for generated rules and questions."""

import shlex
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.acl.policy.worlds import filled, policies_of, worlds

from martlet.access.rules import Rules
from martlet.contracts import Question
from martlet.errors import Refused
from martlet_acl.answering import _gate_name, _question
from martlet_acl.authorizer import RuleAuthorizer
from martlet_acl.observations import Observations
from martlet_acl.policy.document import PolicyDocument, StoredPolicies
from martlet_acl.policy.explanations import explain
from martlet_acl.policy.rules import StoredRule, parse_rule
from martlet_acl.policy.subjects import ANONYMOUS
from martlet_acl.requests import ExplainRequest
from martlet_acl.state import AclState
from martlet_acl.suggestions import Suggestions

ROUNDS = 4  # a command may only remove the first of several reasons to refuse something


@st.composite
def wholes(draw: st.DrawFn) -> tuple[AclState, list[Question]]:
    """Users, rules and questions; beside rules about names inside the topic t there are some about the topic."""
    document, questions = draw(worlds())
    topics = st.sampled_from(("topic:t", "topic:t*", "topic:*", "shared:*", "*"))
    rules: dict[str, StoredPolicies] = {}
    for subject, stored in document.rules.items():
        more = [replace(rule, resource=draw(topics)) for rule in draw(policies_of("topic", "everybody"))]
        found = {rule.resource: rule for rule in (*more, *stored.custom)}
        rules[subject] = StoredPolicies(tuple(found.values()), stored.default)
    policies = filled(PolicyDocument(document.users, document.groups, rules))
    return AclState(policies, observe=draw(st.booleans())), [each for each in questions if is_whole(each)]


def is_whole(question: Question) -> bool:
    """Whether it is about one shared group, if it is about such groups."""
    return question.kind != "shared" or bool(question.name)


def is_allowed(rules: Rules, question: Question) -> bool:
    """Whether a client may do what *question* asks, as the gate asks for it."""
    decisions = rules.of(question.identity, question.address)
    try:
        decisions.check(question.action, _gate_name(question.kind, question.name))
    except Refused:
        return False
    return True


@settings(max_examples=100)
@given(wholes())
def test_an_explanation_is_what_a_client_gets_and_what_is_observed(world: tuple[AclState, list[Question]]) -> None:
    state, questions = world
    rules = Rules()
    rules.authorizers = (RuleAuthorizer(lambda: state),)
    noted: list[Question] = []
    rules.listeners.append(lambda event: noted.append(event.question))
    for question in questions:
        explained = explain(state.policies, question).verdict.allowed
        noted.clear()
        assert is_allowed(rules, question) == (explained or state.observe)
        assert noted == [question] if not explained else noted in ([], [question])


@settings(max_examples=50)
@given(worlds())
def test_a_question_in_words_is_the_question(world: tuple[PolicyDocument, list[Question]]) -> None:
    for question in world[1]:
        identity, name = replace(question.identity, groups=()), question.name
        resource = f"{question.kind}:{name}" if name else question.kind
        request = ExplainRequest(identity.name or ANONYMOUS, question.action, resource, question.address)
        if name.partition("/")[2] or question.kind not in ("name", "shared"):
            assert _question(request) == replace(question, identity=identity)


@settings(max_examples=100)
@given(wholes())
def test_suggested_commands_allow_what_was_observed(world: tuple[AclState, list[Question]]) -> None:
    state, questions = world
    state.observe = True
    for _ in range(ROUNDS):
        observations = Observations(lambda: 0)
        for question in questions:
            verdict = RuleAuthorizer(lambda: state).decide(question)
            assert verdict is not None
            if verdict.observed:
                observations.note_request(question, verdict, "mqtt")
        report = observations.report()
        suggestions = Suggestions(state, report)
        commands = {each.name: suggestions.of(each) for each in report}
        for command in dict.fromkeys(filter(None, commands.values())):
            run(state, command)
    refused = [each for each in questions if not explain(state.policies, each).verdict.allowed]
    assert [each for each in refused if commands[each.name]] == []


def run(state: AclState, command: str) -> None:
    """Do what ``martlet acl`` does."""
    _, _, action, *words = shlex.split(command)
    if action == "user":
        assert words[0] == "enable"
        state.put_user(words[1], replace(state.users[words[1]], disabled=False))
    elif action == "remove":
        assert state.policies.remove_rule(words[0], "custom", words[1])
    else:
        subject, actions, resource, *options = words
        networks = tuple(word for before, word in pairwise(options) if before == "--from")
        rule = parse_rule(StoredRule(resource, tuple(actions.split(",")), "allow", networks))
        state.put_rules(subject, "default" if "--default" in options else "custom", [rule])
