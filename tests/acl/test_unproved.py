"""Users without proof while rules are observed: as many as one remembers."""

from martlet.contracts import Identity
from martlet_acl.unproved import NAMES_MAX, Unproved


def test_only_those_who_were_added_are_unproved_and_never_clients_without_a_name() -> None:
    unproved = Unproved()
    unproved.add("ann")
    unproved.add("")
    assert [unproved.has(Identity(name)) for name in ("ann", "bob", "")] == [True, False, False]


def test_beyond_a_bound_every_user_is_unproved() -> None:
    unproved = Unproved()
    for number in range(NAMES_MAX):
        unproved.add(f"user{number}")
    assert not unproved.has(Identity("bob"))
    unproved.add("one more")
    assert [unproved.has(Identity(name)) for name in ("bob", "")] == [True, False]
