"""Users in groups, and groups in groups."""

from collections.abc import Mapping

import pytest

from martlet_acl.policy import members as module
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import DEPTH_MAX, Memberships, UserRecord


def chain(count: int) -> dict[str, tuple[str, ...]]:
    """A chain of *count* groups."""
    return {f"g{number}": (f"g{number + 1}",) for number in range(1, count)}


def test_groups_are_found_through_groups_each_once_the_nearest_first() -> None:
    members = Memberships()
    members.put_user("alice", UserRecord(groups=("a", "b")))
    members.put_groups({"a": ("c", "d"), "b": ("d",), "d": ("c", "e")})
    assert members.groups_of("alice", ("t", "a")) == ["a", "b", "t", "c", "d", "e"]
    assert members.groups_of("bob", ("b",)) == ["b", "d", "c", "e"]
    assert members.groups_of("bob") == []


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        ({"a": ("a",)}, r"group a: group 'a' is in itself: a in a\Z"),
        ({"a": ("b",), "b": ("c",), "c": ("a",)}, r"is in itself: a in b in c in a"),
        ({"z": ("a",), "a": ("b",), "b": ("a",)}, r"group a: group 'a' is in itself: a in b in a"),
        (chain(9), r"group 'g1' begins a chain of 9 groups; 8 are allowed"),
        (chain(30), r"over more than 8 levels"),
        (chain(30) | {"g30": ("g1",)}, r"over more than 8 levels"),
        ({f"g{number}": (f"g{number - 1}",) for number in range(12, 0, -1)}, r"chain of 9 groups|more than 8 levels"),
        ({"": ("a",)}, r"a group has an empty name"),
        ({"a": ("",)}, r"group a: a group has an empty name"),
        ({"a": ("b\n",)}, r"has a control character"),
        ({"a": ("b" * 256,)}, r"has 256 characters; 255 are allowed"),
        ({"a": tuple(map(str, range(65)))}, r"group a: there are 65 groups; 64 are allowed"),
    ],
)
def test_wrong_groups_are_refused_and_change_nothing(groups: Mapping[str, tuple[str, ...]], error: str) -> None:
    members = Memberships()
    members.put_groups({"x": ("y",)})
    with pytest.raises(PolicyError, match=error):
        members.put_groups(groups)
    assert members.groups == {"x": ("y",)}


def test_the_longest_chain_is_allowed_and_no_change_makes_it_longer() -> None:
    members = Memberships()
    members.put_groups(chain(DEPTH_MAX))
    members.put_user("alice", UserRecord(groups=("g1",)))
    assert members.groups_of("alice") == [f"g{number}" for number in range(1, DEPTH_MAX + 1)]
    with pytest.raises(PolicyError, match="chain of 9 groups"):
        members.put_group("g8", ["more"])
    with pytest.raises(PolicyError, match="chain of 9 groups"):
        members.put_group("less", ["g1"])
    with pytest.raises(PolicyError, match="in itself"):
        members.put_group("g8", ["g3"])


def test_users_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USERS_MAX", 1)
    monkeypatch.setattr(module, "GROUPS_MAX", 1)
    members = Memberships()
    members.put_user("alice", UserRecord())
    members.put_user("alice", UserRecord(groups=("a",)))
    with pytest.raises(PolicyError, match="more than 1 users"):
        members.put_user("bob", UserRecord())
    members.put_group("a", [])
    with pytest.raises(PolicyError, match="more than 1 groups"):
        members.put_group("b", [])
    for name, error in (("", "empty name"), ("a\0", "control character"), ("é" * 256, "256 characters")):
        with pytest.raises(PolicyError, match=error):
            members.put_user(name, UserRecord())
    with pytest.raises(PolicyError, match="there are 65 groups"):
        members.put_user("alice", UserRecord(groups=tuple(map(str, range(65)))))
