"""Decisions about access are those of RocketMQ 5.5.0's own classes, over generated rules and questions."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from tests.acl.policy import reference
from tests.acl.policy.worlds import filled

from martlet.contracts import Identity, Question, RuleLevel
from martlet_acl.policy.document import PolicyDocument, StoredPolicies, StoredUser
from martlet_acl.policy.policies import LEVELS, Policies
from martlet_acl.policy.rules import ACTIONS, StoredRule

from . import fetch

SEED: Final = 20260410
WORLDS: Final = 500
QUESTIONS: Final = 4  # about each
USER: Final = "alice"
GROUPS: Final = ("g0", "g1", "g2")
SUBJECTS: Final = (f"user:{USER}", *(f"group:{group}" for group in GROUPS), "everybody")
# RocketMQ has no shared groups; namespaces are the kind of which nothing else is known.
TYPES: Final = {"topic": "Topic", "group": "Group", "shared": "Namespace", "cluster": "Cluster"}
WORDS: Final = {"publish": "Pub", "subscribe": "Sub", "all": "All"}  # the others begin with a capital
CLUSTER: Final = "DefaultCluster"
RESOURCES: Final = {
    "topic": ("a", "ab", "abc", "a*", "a*", "ab*", "abc*", "*", "{user}", "a_{user}*"),
    "group": ("a", "ab", "a*", "ab*", "*", "é*"),
    "shared": ("s/a", "s/ab", "s*", "s/*", "s/a*", "*"),
    "cluster": ("",),
}
NAMES: Final = {
    "topic": ("a", "ab", "abc", "abcd", "b", "alice", "a_alice", "a_alice2", "*"),
    "group": ("a", "ab", "abc", "é", "é\U0001f600", "b"),
    "shared": ("s/a", "s/ab", "s/abc", "r/a"),
    "cluster": ("",),
}
NETWORKS: Final = (
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.1.2.3",
    "10.1.2.3/9",
    "0.0.0.0/0",
    "192.0.2.128/25",
    "fd00::/8",
    "fd00::1",
)
ADDRESSES: Final = ("10.1.2.3", "10.200.0.1", "192.0.2.200", "192.0.2.1", "fd00::1", "fd12::7", "2001:db8::1")


def some(random: Random, values: Sequence[str], count_max: int) -> tuple[str, ...]:
    return tuple(random.sample(values, random.randint(0, count_max)))


def make_policy(random: Random, kind: str) -> tuple[StoredRule, ...]:
    rules = {}
    for _ in range(random.randint(0, 6)):
        pattern = random.choice(RESOURCES[kind])
        resource = "*" if random.random() < 0.15 else f"{kind}:{pattern}" if pattern else kind
        actions = some(random, ACTIONS, 3) or ("all",)
        networks = some(random, NETWORKS, 2) if random.random() < 0.4 else ()
        rules[resource] = StoredRule(resource, actions, random.choice(("allow", "deny")), networks)
    return tuple(rules.values())


def make_world(random: Random) -> tuple[str, PolicyDocument]:
    """Return the kind that most rules are about, and a user in groups, with rules of all of them."""
    kind = random.choice(tuple(TYPES))
    user = StoredUser(some(random, GROUPS, 2), random.random() < 0.03, random.random() < 0.03)
    subjects = random.sample(SUBJECTS, random.randint(1, 4))
    rules = {each: StoredPolicies(make_policy(random, kind), make_policy(random, kind)) for each in subjects}
    return kind, PolicyDocument({USER: user}, {"g0": ("g1",), "g1": ("g2",)}, rules)


def make_question(random: Random, kind: Any) -> Question:
    action: Any = random.choice(ACTIONS)
    return Question(Identity(USER), action, kind, random.choice(NAMES[kind]), random.choice(ADDRESSES))


def said(document: PolicyDocument, question: Question) -> dict[str, object]:
    """What RocketMQ is asked: one user, who has all rules that count, with his name in them."""
    user = document.users[USER]
    groups = reference.groups_of(document, question.identity)
    subjects = [f"user:{USER}", *(f"group:{group}" for group in groups), "everybody"]

    def entries(level: RuleLevel) -> list[dict[str, object]]:
        rules = [
            rule for subject in subjects if subject in document.rules for rule in document.rules[subject].of(level)
        ]
        return [
            {
                "resource": rocketmq_resource(resource),
                "actions": list(map(word, rule.actions)),
                "networks": rule.networks,
                "decision": rule.decision.capitalize(),
            }
            for rule in rules
            for resource in sorted(reference.spellings(rule.resource, question))
        ]

    return {
        "super": user.administrator,
        "disabled": user.disabled,
        **{level: entries(level) for level in LEVELS},
        "type": TYPES[question.kind],
        "name": question.name or CLUSTER,
        "action": word(question.action),
        "address": question.address,
    }


def word(action: str) -> str:
    return WORDS.get(action, action.capitalize())


def rocketmq_resource(resource: str) -> str:
    kind, colon, name = resource.partition(":")
    return resource if resource == "*" else f"{TYPES[kind]}:{name if colon else CLUSTER}"


def ask_rocketmq(asked: Iterable[dict[str, object]], folder: Path) -> list[str]:
    """Return RocketMQ's answers: allowed, denied, unmatched or disabled."""
    words = [fetch.tool("java"), "-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Duser.home={folder}"]
    ended = subprocess.run(
        [*words, "-cp", fetch.decisions(), "interop.Decisions"],
        cwd=folder,
        input="".join(f"{json.dumps(each)}\n" for each in asked),
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.splitlines()


def ask(policies: Policies, document: PolicyDocument, question: Question) -> str:
    """Return the decision in RocketMQ's words."""
    verdict = policies.decide(question)
    if verdict is None:
        return "unmatched"
    return "allowed" if verdict.allowed else "disabled" if document.users[USER].disabled else "denied"


def test_thousands_of_decisions_are_those_of_rocketmq(tmp_path: Path) -> None:
    random = Random(SEED)
    asked: list[tuple[PolicyDocument, Question]] = []
    ours: list[str] = []
    for _ in range(WORLDS):
        kind, document = make_world(random)
        policies = filled(document)
        for _ in range(QUESTIONS):
            question = make_question(random, kind)
            asked.append((document, question))
            ours.append(ask(policies, document, question))
    theirs = ask_rocketmq((said(*each) for each in asked), tmp_path)
    assert len(ours) == len(theirs) == WORLDS * QUESTIONS
    assert [(each, mine, real) for each, mine, real in zip(asked, ours, theirs, strict=True) if mine != real] == []
    plain = [reference.decide(*each) for each in asked]
    assert plain == [{"allowed": True, "unmatched": None}.get(each, False) for each in ours]
    counts = Counter(theirs)
    assert min(counts["allowed"], counts["denied"], counts["unmatched"]) > len(ours) // 10, counts
    assert counts["disabled"]


@pytest.mark.parametrize(
    ("network", "address", "theirs"),
    [
        ("::/0", "10.0.0.1", "allowed"),  # compared as numbers, whatever their version
        ("2001:db8::1", "2001:db8:0::1", "unmatched"),  # compared as text
    ],
)
def test_addresses_differ_from_rocketmq_as_documented(network: str, address: str, theirs: str, tmp_path: Path) -> None:
    rule = StoredRule("topic:a", ("publish",), "allow", (network,))
    document = PolicyDocument({USER: StoredUser()}, {}, {f"user:{USER}": StoredPolicies((rule,))})
    question = Question(Identity(USER), "publish", "topic", "a", address)
    assert ask_rocketmq([said(document, question)], tmp_path) == [theirs]
    assert ask(filled(document), document, question) == {"allowed": "unmatched", "unmatched": "allowed"}[theirs]
