"""Explanations: the verdict, and the reason of each rule that did not decide."""

from hypothesis import given, settings
from tests.acl.policy.test_policies import allowed, put
from tests.acl.policy.worlds import filled, worlds

from martlet.contracts import Identity, Question, Verdict
from martlet_acl.policy.document import PolicyDocument
from martlet_acl.policy.explanations import DECIDES, Explanation, explain
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import Policies


def shown(explanation: Explanation) -> list[str]:
    return list(map(str, explanation.rules))


def test_each_rule_is_listed_in_order_with_its_outcome() -> None:
    policies = Policies()
    policies.put_user("alice", UserRecord(groups=("devs",)))
    put(policies, "everybody", "allow all on *")
    put(policies, "everybody", "allow all on *", level="default")
    put(policies, "user:alice", "deny publish on topic:orders*")
    put(policies, "user:alice", "allow publish on topic:{user}*")
    put(policies, "group:devs", "allow get on topic:orders")
    put(policies, "group:devs", "allow publish on topic:order*", "10.0.0.0/8")
    put(policies, "group:devs", "allow publish on group:orders")
    put(policies, "group:others", "allow publish on topic:orders")
    put(policies, "group:devs", "allow publish on topic:other", level="default")
    explanation = explain(policies, Question(Identity("alice"), "publish", "topic", "orders_1", "192.0.2.1"))
    assert explanation.subjects == ("user:alice", "group:devs", "everybody")
    assert explanation.verdict == explanation.opinion
    assert explanation.verdict == Verdict(
        False, "user alice, custom: deny publish on topic orders*", "a rule denies it"
    )
    assert shown(explanation) == [
        "group devs, custom: allow get on topic orders: other resource",
        "group devs, custom: allow publish on group orders: other resource",
        "user alice, custom: deny publish on topic orders*: decides",
        "user alice, custom: allow publish on topic {user}*: other resource",
        "group devs, custom: allow publish on topic order* from 10.0.0.0/8: other networks",
        "everybody, custom: allow all on everything: matches, but another rule comes first",
        "group devs, default: allow publish on topic other: other resource",
        "everybody, default: allow all on everything: matches, but a custom rule decides",
    ]


def test_other_actions_are_named() -> None:
    policies = Policies()
    put(policies, "user:alice", "allow get on topic:a")
    explanation = explain(policies, Question(Identity("alice"), "publish", "topic", "a"))
    assert shown(explanation) == ["user alice, custom: allow get on topic a: other actions"]
    assert explanation.opinion is None
    assert explanation.verdict == Verdict(False, reason="no rule of user alice, everybody matches")


def test_a_name_is_explained_with_its_topic() -> None:
    policies = Policies()
    put(policies, "user:alice", "allow publish on topic:mqtt")
    put(policies, "user:alice", "deny publish on name:mqtt/secret/#")
    put(policies, "user:bob", "deny publish on topic:mqtt")
    put(policies, "user:bob", "allow publish on name:mqtt/#")

    def verdict(user: str, name: str) -> tuple[bool, bool | None]:
        explanation = explain(policies, Question(Identity(user), "publish", "name", name))
        assert explanation.of_topic is not None
        return explanation.verdict.allowed, allowed(explanation.opinion)

    assert verdict("alice", "mqtt/open") == (True, None)
    assert verdict("alice", "mqtt/secret/a") == (False, False)
    assert verdict("bob", "mqtt/open") == (False, True)
    assert verdict("carol", "mqtt/open") == (False, None)


def test_a_user_whose_rules_do_not_count_has_none_listed() -> None:
    policies = Policies()
    put(policies, "everybody", "deny all on *")
    policies.put_user("alice", UserRecord(administrator=True))
    policies.put_user("bob", UserRecord(disabled=True))
    for name, is_allowed in (("alice", True), ("bob", False)):
        explanation = explain(policies, Question(Identity(name), "publish", "topic", "a"))
        assert (explanation.verdict.allowed, explanation.rules) == (is_allowed, ())
        assert explanation.verdict.rule.startswith(f"user {name} is")


def test_anonymous_clients_are_named() -> None:
    explanation = explain(Policies(), Question(Identity(), "publish", "topic", "a"))
    assert explanation.verdict.reason == "no rule of anonymous matches"


@settings(max_examples=150)
@given(worlds())
def test_an_explanation_agrees_with_the_decision(world: tuple[PolicyDocument, list[Question]]) -> None:
    policies = filled(world[0])
    for question in world[1]:
        explanation = explain(policies, question)
        assert explanation.opinion == policies.decide(question)
        deciding = [number for number, rule in enumerate(explanation.rules) if rule.outcome == DECIDES]
        if explanation.opinion is None or not explanation.rules:
            assert deciding == []
            assert not any("matches" in rule.outcome for rule in explanation.rules)
            continue
        (number,) = deciding
        assert not any("matches" in rule.outcome for rule in explanation.rules[:number])
        assert explanation.opinion.allowed == explanation.rules[number].rule.allow
