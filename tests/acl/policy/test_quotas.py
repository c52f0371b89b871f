"""Quotas of subjects: which of them count for an identity, and how they are changed."""

import pytest
from hypothesis import given
from msgspec.structs import asdict
from tests.acl.policy.reference import quotas_of
from tests.acl.policy.worlds import filled, worlds

from martlet.contracts import Identity, Question, Quota
from martlet_acl.policy import quotas as module
from martlet_acl.policy.document import PolicyDocument
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import UserRecord
from martlet_acl.policy.policies import Policies
from martlet_acl.policy.quotas import LIMITS, StoredQuota, changed_quota, show_quota

TEN = StoredQuota(messages_in=10)


class Quotas:
    """Quotas of subjects, each with a limit of its own on connections."""

    def __init__(self, **quotas: int) -> None:
        self.policies = Policies()
        for subject, connections in quotas.items():
            self.policies.quotas.put(subject.replace("_", ":"), StoredQuota(connections=connections))

    def of(self, name: str, *groups: str) -> list[tuple[str, int]]:
        return [(each.group, each.connections) for each in self.policies.quotas_of(Identity(name, groups))]


def test_each_limit_of_the_core_is_one_of_the_file() -> None:
    assert Quota.__struct_fields__ == ("group", *LIMITS)
    assert asdict(StoredQuota()) == {name: getattr(Quota(), name) for name in LIMITS}


def test_quotas_of_all_groups_count_however_a_user_is_in_them() -> None:
    quotas = Quotas(user_ann=1, group_shop=2, group_staff=3, group_all=4, group_others=5)
    quotas.policies.put_user("ann", UserRecord(("shop",)))
    quotas.policies.put_groups({"shop": ("staff",), "staff": ("all",)})
    assert quotas.of("ann") == [("", 1), ("shop", 2), ("staff", 3), ("all", 4)]
    assert quotas.of("zoe", "staff") == [("staff", 3), ("all", 4)], "the groups of a token"
    assert quotas.of("", "others") == [("others", 5)]
    assert quotas.of("bob") == []


def test_everybody_has_the_same_quota_but_for_those_with_one_of_their_own() -> None:
    quotas = Quotas(everybody=1, user_ann=2, user_bob=0, anonymous=3, group_g=4)
    assert quotas.of("zoe") == [("", 1)]
    assert quotas.of("zoe", "g") == [("g", 4), ("", 1)]
    assert quotas.of("ann") == [("", 2)]
    assert quotas.of("bob") == [("", 0)], "no limits"
    assert quotas.of("") == [("", 3)]


def test_who_is_removed_has_no_quota() -> None:
    quotas = Quotas(user_ann=1, group_g=2)
    quotas.policies.remove_subject("user:ann")
    assert quotas.of("ann", "g") == [("g", 2)]
    assert not quotas.policies.quotas.remove("user:ann")


@given(worlds())
def test_the_quotas_of_an_identity_are_those_of_its_subjects(world: tuple[PolicyDocument, list[Question]]) -> None:
    document, questions = world
    policies = filled(document)
    for identity in {question.identity for question in questions}:
        found = policies.quotas_of(identity)
        wanted = {group: Quota(group, **asdict(quota)) for group, quota in quotas_of(document, identity).items()}
        assert {each.group: each for each in found} == wanted
        assert len(found) == len(wanted)


def test_a_change_leaves_other_limits_as_they_are() -> None:
    assert changed_quota(None, {"messages_in": 10}) == TEN
    assert changed_quota(TEN, {"refuses": True, "bytes_in": 1}) == StoredQuota(10, 1, refuses=True)
    assert changed_quota(TEN, {"messages_in": 0}) == StoredQuota()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("messages", 1, r"^Object contains unknown field `messages`"),
        ("messages_in", -1, r"^messages_in: Expected `int` >= 0"),
        ("messages_in", True, r"^messages_in: Expected `int`, got `bool`"),
        ("messages_in", (1 << 50) + 1, r"^messages_in: Expected `int` <= 1125899906842624"),
        ("refuses", 1, r"^refuses: Expected `bool`, got `int`"),
    ],
)
def test_a_wrong_change_is_refused_with_its_place(name: str, value: int, error: str) -> None:
    with pytest.raises(PolicyError, match=error):
        changed_quota(TEN, {name: value})


def test_a_quota_is_shown_in_words() -> None:
    assert show_quota(StoredQuota()) == "no limits"
    assert show_quota(StoredQuota(refuses=True)) == "refuses"
    assert show_quota(StoredQuota(messages_in=1, shared_groups=2, refuses=True)) == (
        "messages_in 1, shared_groups 2, refuses"
    )


def test_quotas_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUOTAS_MAX", 2)
    policies = Policies()
    for subject in ("user:a", "user:b", "user:a"):
        policies.quotas.put(subject, TEN)
    with pytest.raises(PolicyError, match="there are 2 quotas already"):
        policies.quotas.put("user:c", TEN)
