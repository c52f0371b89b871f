"""Decisions: as the plain reference takes them, and after any changes as if all had been loaded at once."""

from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from random import Random
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.acl.policy import reference
from tests.acl.policy.worlds import filled, worlds

from martlet.contracts import Identity, Question, RuleLevel, Verdict
from martlet_acl.policy import policies as policies_module
from martlet_acl.policy import policy as policy_module
from martlet_acl.policy.document import PolicyDocument, StoredPolicies, document_of
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import LEVELS, Policies
from martlet_acl.policy.rules import StoredRule, parse_rule


def rule(text: str, *networks: str) -> StoredRule:
    """The rule that *text* says, such as ``deny publish,get on topic:a``."""
    decision, actions, _, resource = text.split(" ", 3)
    return StoredRule(resource, tuple(actions.split(",")), decision, networks)


def put(policies: Policies, subject: str, text: str, *networks: str, level: RuleLevel = "custom") -> None:
    policies.put_rule(subject, level, parse_rule(rule(text, *networks)))


def ask(
    policies: Policies, name: str, action: str = "publish", user: str = "alice", address: str = ""
) -> Verdict | None:
    """Ask about the resource *name*, such as ``topic:a``."""
    kind, _, rest = name.partition(":")
    return policies.decide(Question(Identity(user), action, kind, rest, address))  # type: ignore[arg-type]


def allowed(verdict: Verdict | None) -> bool | None:
    return None if verdict is None else verdict.allowed


def may(policies: Policies, name: str, action: str = "publish", user: str = "alice", address: str = "") -> bool | None:
    return allowed(ask(policies, name, action, user, address))


@settings(max_examples=300)
@given(worlds())
def test_decisions_are_those_of_the_plain_reference(world: tuple[PolicyDocument, list[Question]]) -> None:
    document, questions = world
    policies = filled(document)
    for question in questions:
        assert allowed(policies.decide(question)) == reference.decide(document, question)


Change: TypeAlias = Callable[[], object]


def changes_between(policies: Policies, old: PolicyDocument, new: PolicyDocument) -> list[Change]:
    """What turns the rules and users of *old* into those of *new*, one at a time, in any order."""
    found: list[Change] = [partial(policies.put_groups, new.groups)]
    found += [partial(policies.put_user, name, user) for name, user in new.users.items()]
    found += [partial(policies.remove_user, name) for name in old.users.keys() - new.users.keys()]
    for subject in {**old.rules, **new.rules}:
        for level in LEVELS:
            was, becomes = (each.rules.get(subject, StoredPolicies()).of(level) for each in (old, new))
            found += [partial(policies.put_rule, subject, level, parse_rule(rule)) for rule in becomes]
            gone = {rule.resource for rule in was} - {rule.resource for rule in becomes}
            found += [partial(policies.remove_rule, subject, level, resource) for resource in gone]
    return found


def count_rules(document: PolicyDocument) -> int:
    return sum(len(stored.of(level)) for stored in document.rules.values() for level in LEVELS)


def networks_in(document: PolicyDocument) -> set[IPv4Network | IPv6Network]:
    rules = [rule for stored in document.rules.values() for level in LEVELS for rule in stored.of(level)]
    return {ip_network(network, strict=False) for rule in rules for network in rule.networks}


@settings(max_examples=100)
@given(worlds(), worlds(), st.randoms(use_true_random=False))
def test_after_any_changes_all_is_as_if_loaded_at_once(
    before: tuple[PolicyDocument, list[Question]], after: tuple[PolicyDocument, list[Question]], random: Random
) -> None:
    questions = before[1] + after[1]
    policies = filled(before[0])
    changes = changes_between(policies, before[0], after[0])
    random.shuffle(changes)
    for change in changes:
        policies.decide(random.choice(questions))  # what it remembers must not outlive a change
        change()
    assert [allowed(policies.decide(question)) for question in questions] == [
        reference.decide(after[0], question) for question in questions
    ]
    assert len(policies) == count_rules(after[0])
    assert policies.networks == networks_in(after[0])


@given(worlds())
def test_a_document_of_policies_is_one_that_makes_the_same(world: tuple[PolicyDocument, list[Question]]) -> None:
    document = document_of(filled(world[0]))
    assert document_of(filled(document)) == document
    assert count_rules(document) == count_rules(world[0])


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (["deny publish on topic:orders", "allow all on topic:orders*"], False),
        (["allow publish on topic:orders", "deny all on topic:orders*"], True),
        (["deny all on topic:ord*", "allow publish on topic:orders*"], True),
        (["deny all on topic:*", "allow publish on topic:o*"], True),
        (["deny all on *", "allow publish on topic:*"], True),
        (["deny subscribe on topic:orders", "allow all on topic:*"], True),
        (["allow publish on topic:order", "allow subscribe on *"], None),
        ([], None),
    ],
)
def test_the_nearest_resource_decides_and_other_actions_do_not_count(rules: list[str], expected: bool | None) -> None:
    policies = Policies()
    for text in rules:
        put(policies, "user:alice", text)
    assert may(policies, "topic:orders") is expected


def test_default_rules_count_only_where_no_custom_one_matches() -> None:
    policies = Policies()
    put(policies, "user:alice", "deny all on topic:orders", level="default")
    put(policies, "everybody", "allow publish on *")
    assert may(policies, "topic:orders") is True
    assert may(policies, "topic:orders", "subscribe") is False


def test_rules_of_a_user_of_groups_and_of_everybody_count_alike() -> None:
    policies = Policies()
    policies.put_user("alice", UserRecord(groups=("devs",)))
    policies.put_group("devs", ["staff"])
    put(policies, "user:alice", "allow publish on topic:a*")
    put(policies, "group:staff", "deny publish on topic:ab*")
    put(policies, "everybody", "allow publish on topic:abc")
    assert [may(policies, name) for name in ("topic:a", "topic:ab", "topic:abc")] == [True, False, True]


def test_deny_comes_before_allow_on_the_same_resource() -> None:
    policies = Policies()
    put(policies, "user:alice", "allow publish on topic:a")
    put(policies, "everybody", "deny publish on topic:a")
    put(policies, "user:bob", "deny publish on name:t/+/b")
    put(policies, "user:bob", "allow publish on name:t/a/+")
    assert may(policies, "topic:a") is False
    assert may(policies, "name:t/a/b", user="bob") is False


def test_groups_of_a_token_count_as_well() -> None:
    policies = Policies()
    policies.put_group("devs", ["staff"])
    put(policies, "group:staff", "allow publish on topic:a")
    question = Question(Identity("stranger", ("devs",)), "publish", "topic", "a")
    assert allowed(policies.decide(question)) is True


def test_anonymous_clients_have_only_their_own_rules() -> None:
    policies = Policies()
    put(policies, "everybody", "allow all on *")
    assert may(policies, "topic:a", user="") is None
    put(policies, "anonymous", "allow publish on topic:a")
    assert may(policies, "topic:a", user="") is True
    assert may(policies, "topic:a", user="anonymous") is True  # a user of that name is one of everybody


def test_an_administrator_may_do_everything_and_a_disabled_user_nothing() -> None:
    policies = Policies()
    put(policies, "everybody", "deny all on *")
    put(policies, "user:bob", "allow all on *", level="default")
    policies.put_user("alice", UserRecord(administrator=True))
    assert ask(policies, "cluster", "update") == Verdict(True, "user alice is an administrator")
    policies.put_user("alice", UserRecord(administrator=True, disabled=True))
    assert ask(policies, "cluster", "update") == Verdict(False, "user alice is disabled", "the user is disabled")


def test_a_rule_holds_for_its_networks() -> None:
    policies = Policies()
    put(policies, "user:alice", "allow publish on topic:a", "10.0.0.0/8", "fd00::1")
    put(policies, "user:alice", "deny all on topic:*")
    found = {address: may(policies, "topic:a", address=address) for address in ("10.1.1.1", "fd00::1", "fd00::2", "")}
    assert found == {"10.1.1.1": True, "fd00::1": True, "fd00::2": False, "": False}


def test_a_pattern_covers_the_filters_that_select_only_what_it_allows() -> None:
    policies = Policies()
    put(policies, "user:alice", "allow subscribe on name:mqtt/home/+")
    put(policies, "user:bob", "allow subscribe on name:mqtt/home/*")
    covered = ["home/a", "home/+", "home/#", "home", "home/+/#", "+/+"]
    asked = [may(policies, f"name:mqtt/{name}", "subscribe") for name in covered]
    assert asked == [True, True, None, None, None, None]
    asked = [may(policies, f"name:mqtt/{name}", "subscribe", user="bob") for name in covered]
    assert asked == [True, True, None, None, True, None]  # home/# also selects home


def test_what_a_client_publishes_to_is_a_name_and_no_filter() -> None:
    policies = Policies()
    put(policies, "user:alice", "deny publish,subscribe on name:t/a/+")
    put(policies, "user:alice", "allow publish,subscribe on name:t/#")
    assert may(policies, "name:t/a/#", "publish") is False
    assert may(policies, "name:t/a/#", "subscribe") is True  # its messages are asked about one by one


def test_the_name_of_a_user_is_one_level_however_it_is_spelt() -> None:
    policies = Policies()
    put(policies, "everybody", "allow publish on name:mqtt/{user}/#")
    put(policies, "everybody", "allow publish on topic:of_{user}")
    for user, level in (("alice", "alice"), ("+49", "%2B49"), ("a/b", "a%2Fb"), ("a b", "a b"), ("a b", "a%20b")):
        assert may(policies, f"name:mqtt/{level}/state", user=user) is True
        assert may(policies, f"topic:of_{level}", user=user) is True
        assert may(policies, f"name:mqtt/{level}x/state", user=user) is None
    assert may(policies, "name:mqtt/+/state", "subscribe", user="+") is None
    assert may(policies, "name:mqtt/{user}/state") is None


def test_a_verdict_names_the_rule() -> None:
    policies = Policies()
    put(policies, "user:alice", "deny publish,get on topic:orders*", "10.0.0.0/8", "fd00::1")
    put(policies, "everybody", "allow all on *", level="default")
    put(policies, "everybody", "allow get on cluster")
    rule = "user alice, custom: deny publish, get on topic orders* from 10.0.0.0/8, fd00::1"
    assert ask(policies, "topic:orders1", address="10.0.0.1") == Verdict(False, rule, "a rule denies it")
    assert ask(policies, "topic:x") == Verdict(True, "everybody, default: allow all on everything")
    assert ask(policies, "cluster", "get") == Verdict(True, "everybody, custom: allow get on cluster")


def test_a_rule_replaces_the_one_about_the_same_resource() -> None:
    policies = Policies()
    put(policies, "user:alice", "allow publish on topic:a", "10.0.0.0/8")
    put(policies, "user:alice", "deny get on topic:a")
    assert [each.stored() for each in policies.rules_of("user:alice", "custom")] == [rule("deny get on topic:a")]
    assert (len(policies), set(policies.networks)) == (1, set())


def test_rules_keep_the_order_in_which_they_were_added() -> None:
    """So that the number of a rule is its place in the file."""
    policies = Policies()
    texts = ["name:mqtt/{user}/a", "topic:b", "name:mqtt/{user}/c", "topic:d", "topic:e"]

    def order() -> list[str]:
        return [each.resource.text for each in policies.rules_of("everybody", "custom")]

    for text in texts:
        put(policies, "everybody", f"allow publish on {text}")
    assert order() == texts
    put(policies, "everybody", "deny publish on topic:b")
    policies.remove_rule("everybody", "custom", "topic:d")
    assert order() == [text for text in texts if text != "topic:d"]
    for text in (texts[0], texts[2]):
        policies.remove_rule("everybody", "custom", text)
    put(policies, "everybody", "allow publish on name:mqtt/{user}/a")
    assert order() == ["topic:b", "topic:e", texts[0]]


def test_removed_rules_are_gone() -> None:
    policies = Policies()
    put(policies, "user:alice", "allow publish on name:t/a/+", "10.0.0.0/8")
    put(policies, "user:alice", "allow publish on name:t/{user}")
    put(policies, "user:alice", "allow publish on name:t/*", level="default")
    assert may(policies, "name:t/alice") is True
    removed = policies.remove_rule("user:alice", "custom", "name:t/{user}")
    assert removed is not None
    assert policies.remove_rule("user:alice", "custom", "name:t/{user}") is None
    assert policies.remove_rule("user:bob", "custom", "name:t/{user}") is None
    assert may(policies, "name:t/alice") is True
    policies.remove_rules("user:alice")
    assert may(policies, "name:t/alice") is None
    assert (len(policies), list(policies), list(policies.networks)) == (0, [], [])


@pytest.mark.parametrize(
    ("subject", "text", "error"),
    [
        ("alice", "allow get on *", r"subject 'alice' is unknown; write user:NAME, group:NAME, everybody or anonymous"),
        ("user:", "allow get on *", r"a user has an empty name"),
        ("anonymous", "allow get on topic:{user}", r"has \{user\}, but anonymous clients have no name"),
    ],
)
def test_a_wrong_subject_is_refused(subject: str, text: str, error: str) -> None:
    policies = Policies()
    with pytest.raises(PolicyError, match=error):
        put(policies, subject, text)
    assert list(policies) == []


def test_too_many_rules_are_refused_and_replacements_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies_module, "RULES_MAX", 3)
    monkeypatch.setattr(policy_module, "RULES_MAX", 2)
    monkeypatch.setattr(policy_module, "TEMPLATES_MAX", 1)
    policies = Policies()
    put(policies, "user:alice", "allow get on topic:{user}")
    with pytest.raises(PolicyError, match=r"more than 1 rules with \{user\}"):
        put(policies, "user:alice", "allow get on topic:{user}*")
    put(policies, "user:alice", "allow get on topic:a")
    with pytest.raises(PolicyError, match="more than 2 rules"):
        put(policies, "user:alice", "allow get on topic:b")
    put(policies, "user:bob", "allow get on topic:b")
    with pytest.raises(PolicyError, match="there are 3 rules already"):
        put(policies, "user:carol", "allow get on topic:b")
    put(policies, "user:bob", "deny get on topic:b")
    assert len(policies) == 3


def test_remembered_users_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies_module, "STANDINGS_MAX", 2)
    policies = Policies()
    put(policies, "everybody", "allow publish on topic:{user}")
    assert [may(policies, f"topic:u{number}", user=f"u{number}") for number in range(5)] == [True] * 5


def test_an_ipv4_address_inside_of_ipv6_is_the_ipv4_address() -> None:
    policies = Policies()
    put(policies, "user:alice", "allow publish on topic:a", "10.0.0.0/8")
    put(policies, "user:alice", "allow publish on topic:b", "::/0")
    addresses = ("10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "")
    found = [[may(policies, name, address=address) for address in addresses] for name in ("topic:a", "topic:b")]
    assert found == [[True, True, None, None], [None, None, True, None]]


def test_each_change_counts_at_once() -> None:
    policies = Policies()
    put(policies, "user:alice", "allow get on topic:a")
    assert may(policies, "topic:alice") is None
    put(policies, "user:alice", "allow publish on topic:{user}")
    assert may(policies, "topic:alice") is True
    put(policies, "user:alice", "deny publish on topic:{user}")
    assert may(policies, "topic:alice") is False
    policies.remove_rule("user:alice", "custom", "topic:{user}")
    assert may(policies, "topic:alice") is None
    put(policies, "user:alice", "allow publish on topic:*", level="default")
    assert may(policies, "topic:alice") is True
    policies.put_user("alice", UserRecord(groups=("devs",)))
    put(policies, "group:devs", "deny publish on topic:alice")
    assert may(policies, "topic:alice") is False
    policies.remove_user("alice")
    assert may(policies, "topic:alice") is True
    policies.put_user("alice", UserRecord(groups=("team",)))
    policies.put_group("team", ["devs"])
    assert may(policies, "topic:alice") is False
    policies.remove_group("team")
    assert may(policies, "topic:alice") is True
