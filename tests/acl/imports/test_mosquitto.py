"""Mosquitto's files: the imported rules decide as Mosquitto does."""

import itertools
from collections.abc import Mapping
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.contracts import Identity, Question
from martlet_acl.imports.findings import Imported
from martlet_acl.imports.mosquitto import read_acl_file, read_password_file
from martlet_acl.passwords import parse_verifier
from martlet_acl.policy.policies import Policies
from martlet_acl.policy.rules import parse_rule

Access = Literal["publish", "subscribe"]


def policies_of(imported: Imported) -> Policies:
    policies = Policies()
    for each in imported.rules:
        policies.put_rule(each.subject, each.level, parse_rule(each.rule))
    return policies


def may(policies: Policies, user: str, action: Access, name: str) -> bool:
    resource = name if name.startswith("$") else f"mqtt/{name}"
    verdict = policies.decide(Question(Identity(user), action, "name", resource))
    return verdict is not None and verdict.allowed


def rules_of(imported: Imported) -> list[str]:
    return [
        f"{each.subject} {each.level}: {each.rule.decision} {','.join(each.rule.actions)} on {each.rule.resource}"
        for each in imported.rules
    ]


# users


def test_hashed_passwords_are_kept() -> None:
    # mosquitto_passwd 2.0.11: -b -c FILE alice secret, and -H sha512 -b FILE bob sécret.
    source = (
        "# users\n"
        "alice:$7$101$TDMSU3qLFrc8mJKp$"
        "3K0sCoqbMhFLfMCJHSqiu+Ws55oIq050xXrRp9jXF4bF2uq0fW3I/ULO25UjPo+NU1nD6ziI6tx+B3JwN7Sqwg==\n"
        "bob:$6$s08oPj8fdHlw0oto$"
        "700uY3hGCsg1Z3uaBHZ8iu+/tOMyAte9yxsxZDO5gKHx09EhPymZXK8o5xHxDY2E/YkzMyVgDpnmvYyL2S0ILg==\n"
    )
    imported = read_password_file(source)
    for name, password in (("alice", b"secret"), ("bob", "sécret".encode())):
        verifier = parse_verifier(imported.users[name].password)
        assert verifier.accepts(password)
        assert not verifier.accepts(b"another")
    assert imported.remarks == ["line 3: the password of user 'bob' has a weak hash, one round of SHA-512; set it anew"]


@pytest.mark.parametrize(
    ("line", "remark", "users"),
    [
        ("carol", "line 1: it is no user and password with a colon between them", 0),
        (":x", "line 1: it is no user and password with a colon between them", 0),
        ("carol:letmein", "line 1: the password of user 'carol' is not hashed in a known way; set it anew", 1),
        (
            "carol:$7$9999999$AAAA$AAAA",
            "password of user 'carol': the parameter i=9999999 of pbkdf2 is out of range",
            1,
        ),
        ("carol:$7$101$AAAA$AAAA", "password of user 'carol': the hash of pbkdf2 has 3 bytes", 1),
        ("a\x01b:x", "the user is not imported", 0),
    ],
)
def test_a_line_without_a_known_hash_is_named(line: str, remark: str, users: int) -> None:
    imported = read_password_file(line)
    assert any(remark in each for each in imported.remarks)
    assert [user.password for user in imported.users.values()] == [""] * users
    assert "letmein" not in str(imported)


def test_the_first_of_two_lines_of_a_user_counts() -> None:
    imported = read_password_file("a:$7$101$AAAA$AAAAAAAAAAAAAAAAAAAAAAAA\na:b")
    assert imported.users["a"].password.startswith("$pbkdf2-sha512$i=101$")
    assert "line 2: user 'a' is there already; only the first one is imported" in imported.remarks


# rules

EXAMPLE = """
# of Mosquitto's own example
topic read $SYS/#

user roger
topic foo/bar
topic write sensors/#
topic deny sensors/secret

pattern write devices/%u/#
"""


def test_entries_are_custom_rules_and_patterns_default_ones() -> None:
    imported = read_acl_file(EXAMPLE)
    assert rules_of(imported) == [
        "anonymous custom: allow subscribe on name:$SYS/#",
        "user:roger custom: deny all on name:mqtt/sensors/secret",
        "user:roger custom: allow publish,subscribe on name:mqtt/foo/bar",
        "user:roger custom: allow publish on name:mqtt/sensors/#",
        "everybody default: allow publish on name:mqtt/devices/{user}/#",
        "everybody default: allow subscribe on shared:mqtt/*",
        "anonymous default: allow subscribe on shared:mqtt/*",
    ]
    [remark] = imported.remarks
    assert remark.startswith("Mosquitto accepts each subscription")


def test_a_deny_counts_before_an_entry_with_fewer_names() -> None:
    imported = read_acl_file("user u\ntopic read a/b/#\ntopic deny +/+/c\ntopic write x/y\ntopic deny x/#")
    assert rules_of(imported)[:4] == [
        "user:u custom: deny all on name:mqtt/+/+/c",
        "user:u custom: deny all on name:mqtt/x/#",
        "user:u custom: allow subscribe on name:mqtt/a/b/#",
        "user:u custom: deny all on name:mqtt/a/b/c",
    ]
    assert "line 4: a deny has all of its names; it is not imported" in imported.remarks


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        ("pattern write dev/%c/x", "'dev/%c/x' cannot be said: client identifiers prove nothing"),
        ("topic read a*", "'a*' cannot be said: rules have other wildcards"),
        ("topic read a/{user}", "'a/{user}' cannot be said: rules have other wildcards"),
        ("topic read a/#/b", "it has a # before its end"),
        ("topic read a+/b", "it has a wildcard inside the level 'a+'"),
        ("topic look a", "access 'look' is unknown"),
        ("topic read $CONTROL/#", "there are no topics below '$CONTROL' to give rights for"),
        ("topic", "it is no line of an ACL file"),
        ("user", "it is no line of an ACL file"),
        ("acl a", "it is no line of an ACL file"),
    ],
)
def test_what_cannot_be_said_is_named_and_left_out(line: str, remark: str) -> None:
    imported = read_acl_file(line)
    assert imported.rules == []
    assert imported.remarks[0].startswith(f"line 1: {remark}")


@pytest.mark.parametrize(
    ("line", "resource"),
    [
        ("pattern deny dev/%c/x", "name:mqtt/dev/+/x"),
        ("pattern deny a*/b", "name:mqtt/+/b"),
        (f"pattern deny {'x' * 1100}", "name:mqtt/#"),
    ],
)
def test_a_deny_that_cannot_be_said_denies_more(line: str, resource: str) -> None:
    imported = read_acl_file(line)
    assert {each.rule.resource for each in imported.rules} == {resource}
    assert any("is denied instead" in remark for remark in imported.remarks)


# against Mosquitto's own way to decide

LEVELS = ("a", "b", "u")
NAMES = ["/".join(levels) for depth in (1, 2, 3) for levels in itertools.product(LEVELS, repeat=depth)]
USERS = ("u", "v", "")  # the last one is anonymous
Line = tuple[str, str]  # access, filter

filters = st.tuples(st.lists(st.sampled_from(["a", "b", "u", "+", "%u"]), max_size=3), st.booleans()).map(
    lambda made: "/".join([*made[0], *(["#"] if made[1] or not made[0] else [])])
)
lines = st.lists(st.tuples(st.sampled_from(["read", "write", "readwrite", "deny"]), filters), max_size=5)


def selects(topic_filter: str, name: str) -> bool:
    levels, given_levels = topic_filter.split("/"), name.split("/")
    for place, level in enumerate(levels):
        if level == "#":
            return True
        if place >= len(given_levels) or level not in ("+", given_levels[place]):
            return False
    return len(levels) == len(given_levels)


def first_opinion(entries: list[Line], action: Access, name: str) -> bool | None:
    """As Mosquitto looks through a list, in which it has put each deny first."""
    word = {"publish": "write", "subscribe": "read"}[action]
    matching = [access for access, topic_filter in entries if selects(topic_filter, name)]
    if "deny" in matching:
        return False
    return True if word in matching or "readwrite" in matching else None


def mosquitto_allows(
    entries: Mapping[str, list[Line]], patterns: list[Line], user: str, action: Access, name: str
) -> bool:
    opinion = first_opinion(entries.get(user, []), action, name)
    if opinion is None:
        own = [(access, each.replace("%u", user)) for access, each in patterns if user or "%u" not in each]
        opinion = first_opinion(own, action, name)
    return opinion is True


@given(st.fixed_dictionaries(dict.fromkeys(USERS, lines)), lines)
def test_rules_decide_as_mosquitto(entries: dict[str, list[Line]], patterns: list[Line]) -> None:
    literal = {user: [(access, each.replace("%u", "u")) for access, each in some] for user, some in entries.items()}
    source = "".join(f"topic {access} {each}\n" for access, each in literal[""])
    for user in ("u", "v"):
        source += f"user {user}\n" + "".join(f"topic {access} {each}\n" for access, each in literal[user])
    source += "".join(f"pattern {access} {each}\n" for access, each in patterns)
    imported = read_acl_file(source)
    policies = policies_of(imported)
    is_exact = not any("cannot be said" in each or "for some users only" in each for each in imported.remarks)
    for user, name in itertools.product(USERS, NAMES):
        for action in ("publish", "subscribe"):
            real = mosquitto_allows(literal, patterns, user, action, name)
            ours = may(policies, user, action, name)
            assert ours == real or (not is_exact and not ours), f"{user!r} may {action} {name}: {ours}\n{source}"
