"""The text form of resources, their order, and the names of users in patterns."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.acl.policy import reference

from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.resources import KINDS, expand, levels_of_user, parse_resource


def names(levels: Sequence[str], depth: int) -> list[str]:
    """All names of up to *depth* levels in the topic ``t``."""
    return ["/".join(("t", *each)) for count in range(1, depth + 1) for each in product(levels, repeat=count)]


NAMES = names(("a", "ab", "b", "bb", "", "~"), 4)
PATTERNS = [
    *names(("a", "ab", "+"), 3),
    *(f"{name}/#" for name in ("t", *names(("a", "ab", "+"), 3))),
    *(f"{name}{end}" for name in names(("a", "b"), 2) for end in ("*", "b*", "/*")),
    *("t*", "t/*", "*"),
]


@pytest.mark.parametrize(
    ("text", "kind", "form", "name"),
    [
        ("topic:orders", "topic", "literal", "orders"),
        ("topic:%RETRY%billing", "topic", "literal", "%RETRY%billing"),
        ("topic:$SYS", "topic", "literal", "$SYS"),
        ("topic:orders*", "topic", "prefix", "orders"),
        ("topic:*", "topic", "any", "*"),
        ("topic:{user}_in", "topic", "literal", "{user}_in"),
        ("group:billing", "group", "literal", "billing"),
        ("shared:stomp/queue/a/+", "shared", "literal", "stomp/queue/a/+"),
        ("shared:mqtt/*", "shared", "prefix", "mqtt/"),
        ("shared:mq*", "shared", "prefix", "mq"),
        ("name:mqtt/home/door", "name", "literal", "mqtt/home/door"),
        ("name:mqtt//", "name", "literal", "mqtt//"),
        ("name:mqtt/home/+/temp", "name", "wildcards", "mqtt/home/+/temp"),
        ("name:mqtt/#", "name", "wildcards", "mqtt/#"),
        ("name:mqtt/home/d*", "name", "prefix", "mqtt/home/d"),
        ("name:mq*", "name", "prefix", "mq"),
        ("name:*", "name", "any", "*"),
        ("name:t:u/a:b", "name", "literal", "t:u/a:b"),
        ("cluster", "cluster", "literal", ""),
        ("*", "any", "any", ""),
    ],
)
def test_a_resource_has_a_kind_and_a_pattern(text: str, kind: str, form: str, name: str) -> None:
    resource = parse_resource(text)
    assert (resource.text, resource.kind, resource.form, resource.name) == (text, kind, form, name)
    assert resource.is_template == ("{user}" in text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", r"has no kind; write one of topic, name, group, shared, cluster and a colon"),
        ("orders", r"'orders' has no kind"),
        ("Topic:orders", r"has no kind"),
        ("queue:orders", r"has no kind"),
        ("topic/orders", r"has no kind"),
        ("topic:", r"has no name; for all names write \*"),
        ("topic:a\n", r"has a control character"),
        ("topic:\ud800", r"has a control character"),
        ("topic:a*b", r"has a \* that is not at its end"),
        ("topic:**", r"has a \* that is not at its end"),
        ("topic:t/a", r"has a '/', which no topic has; names inside a topic are name:t/a"),
        ("group:t/a", r"has a '/', which no group has\Z"),
        ("topic:a/+", r"has a '/'"),
        ("topic:+", r"has a wildcard of topic filters; only name:topic/filter has these"),
        ("group:#", r"has a wildcard of topic filters"),
        ("shared:g", r"is no scope/group"),
        ("shared:/g", r"is no scope/group"),
        ("shared:mqtt/", r"is no scope/group"),
        ("name:mqtt", r"is no topic/name; for the topic itself write topic:NAME"),
        ("name:mqtt/", r"is no topic/name"),
        ("name:/a", r"is no topic/name"),
        ("name:+/a", r"has a wildcard for the topic"),
        ("name:#", r"is no topic/name"),
        ("name:mqtt/a+", r"has a wildcard inside the level 'a\+'"),
        ("name:mqtt/a#", r"has a wildcard inside the level 'a#'"),
        ("name:mqtt/#/a", r"has a # before its end"),
        ("name:mqtt/#*", r"has a wildcard inside the level|has a # before its end"),
        ("name:mqtt/+/a*", r"has both \+ and \*"),
        ("name:mqtt/+*", r"has both \+ and \*"),
        ("topic:{usr}", r"has \{usr\}; the only name in braces is \{user\}"),
        ("topic:{}", r"has \{\}"),
        ("name:mqtt/{user}/{clientid}", r"has \{clientid\}"),
        ("cluster:a", r"has a name; a rule about the broker itself is about 'cluster'"),
        ("cluster:*", r"has a name"),
        ("cluster:", r"has no name"),
        ("topic:" + "x" * 1024, r"has 1030 characters; 1024 are allowed"),
    ],
)
def test_a_text_that_is_no_resource_is_refused_with_a_reason(text: str, error: str) -> None:
    with pytest.raises(PolicyError, match=error):
        parse_resource(text)


@given(st.text("tna:/*+#{}user%", max_size=12) | st.text(max_size=12), st.sampled_from((*KINDS, "x")))
def test_any_text_is_a_resource_or_refused(text: str, kind: str) -> None:
    for candidate in (text, f"{kind}:{text}"):
        try:
            resource = parse_resource(candidate)
        except PolicyError:
            continue
        assert resource.text == candidate
        assert resource.rank
        assert str(resource)


def test_what_selects_fewer_names_comes_first() -> None:
    selected = {
        parse_resource(f"name:{pattern}"): {name for name in NAMES if reference.has_name("name", pattern, name)}
        for pattern in PATTERNS
    }
    pairs = [(fewer, more) for fewer, more in product(selected, repeat=2) if selected[fewer] < selected[more]]
    assert len(pairs) > 1000
    assert [(fewer.text, more.text) for fewer, more in pairs if not fewer.rank < more.rank] == []


user_names = st.text("+/#%2FB*é a", min_size=1, max_size=4) | st.text(max_size=5)


@given(st.lists(user_names, min_size=2, max_size=2, unique=True))
def test_no_two_users_have_a_level_in_common(users: list[str]) -> None:
    one, other = map(levels_of_user, users)
    assert not set(one) & set(other)
    for level in (*one, *other):
        assert not set(level) & set("/+#*")


def test_a_template_becomes_the_resources_of_a_user() -> None:
    template = parse_resource("name:mqtt/{user}/{user}*")
    texts = [each.text for each in expand(template, levels_of_user("a b"))]
    assert texts == ["name:mqtt/a b/a b*", "name:mqtt/a%20b/a%20b*"]
    assert expand(template, levels_of_user("")) == ()
