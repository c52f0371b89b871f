"""Expressions of RabbitMQ's permissions as names and beginnings of names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet_acl.imports.name_expressions import NamePatterns, is_found_in, parse_expression
from martlet_acl.policy.errors import PolicyError


@pytest.mark.parametrize(
    ("expression", "names", "beginnings"),
    [
        ("", [], []),
        ("^$", [], []),
        (".*", [], [""]),
        ("^.*$", [], [""]),
        ("^orders$", ["orders"], []),
        ("^orders", [], ["orders"]),
        ("^orders-.*", [], ["orders-"]),
        ("^orders-.*$", [], ["orders-"]),
        (r"^a\.b$|^c", ["a.b"], ["c"]),
        (r"^(a|b\.(c|d))$", ["a", "b.c", "b.d"], []),
        (r"^(?:a|b)-(x|y)", [], ["a-x", "a-y", "b-x", "b-y"]),
        (r"(^a$|^b.*)", ["a"], ["b"]),
        (r"^{username}-.*", [], ["{username}-"]),
        (r"^\^\$\(\)$", ["^$()"], []),
    ],
)
def test_what_can_be_said_exactly(expression: str, names: list[str], beginnings: list[str]) -> None:
    assert parse_expression(expression) == NamePatterns(tuple(names), tuple(beginnings))


@pytest.mark.parametrize(
    ("expression", "patterns", "remark"),
    [
        ("orders", NamePatterns((), ("orders",)), "without ^ it also matches inside names"),
        ("orders$", NamePatterns(("orders",)), "without ^ it also matches inside names"),
        ("^my.queue$", NamePatterns(("my.queue",)), "a dot is any character"),
    ],
)
def test_some_are_imported_with_fewer_names(expression: str, patterns: NamePatterns, remark: str) -> None:
    found = parse_expression(expression)
    assert (found.names, found.beginnings) == (patterns.names, patterns.beginnings)
    assert found.remarks[0].startswith(remark)


@pytest.mark.parametrize(
    "expression",
    [
        r"^[a-z]+$",
        r"^a+",
        r"^a?b",
        r"^\d",
        r"^a.*b$",
        r".*-orders$",
        r"^a.+$",
        r"^(a",
        r"a)",
        r"^(?!a)",
        "^(a|b)*$",
        "x" * 5000,
        "(a|b)" * 8,
        "(" * 200,
    ],
)
def test_what_cannot_be_said_is_refused(expression: str) -> None:
    with pytest.raises(PolicyError):
        parse_expression(expression)


def test_the_expression_itself_is_searched() -> None:
    assert is_found_in("topic", "amq.topic")
    assert is_found_in("[a-z]+", "amq.topic")
    assert not is_found_in("", "amq.topic")
    assert not is_found_in("(", "amq.topic")


TEXTS = ["a", "b", "ab", "a.b", "aXb", "ba", "abc", "", "-a"]
expressions = st.lists(st.sampled_from(["^", "$", "a", "b", r"\.", ".", ".*", "|", "(", ")", "-"]), max_size=8)


@given(expressions.map("".join))
def test_nothing_is_matched_that_the_expression_does_not_match(expression: str) -> None:
    try:
        patterns = parse_expression(expression)
        compiled = re.compile(expression) if expression else None
    except (PolicyError, re.error):
        return
    for text in TEXTS:
        if text in patterns.names or text.startswith(patterns.beginnings):
            assert compiled is not None
            assert compiled.search(text), (expression, text)
