"""Whether one resource covers what is asked about: each name of a filter, as the plain reference says."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.acl.policy import reference
from tests.acl.policy.worlds import NAMES, RESOURCES

from martlet.contracts import Identity, Question
from martlet_acl.policy.asked import Asked
from martlet_acl.policy.resources import parse_resource


@settings(max_examples=100)
@given(
    st.lists(RESOURCES["name"].filter(lambda pattern: "{user}" not in pattern), min_size=4, max_size=4),
    st.lists(NAMES["name"], min_size=4, max_size=4),
)
def test_a_pattern_covers_what_it_has_each_name_of(patterns: list[str], names: list[str]) -> None:
    for pattern, name, action in product(patterns, names, ("publish", "subscribe")):
        question = Question(Identity("alice"), action, "name", name)  # type: ignore[arg-type]
        resource = f"name:{pattern}"
        assert Asked(question).is_covered_by(parse_resource(resource)) == reference.covers(resource, question)


def test_a_resource_covers_only_its_kind() -> None:
    asked = Asked(Question(Identity("alice"), "publish", "group", "a"))
    covering = [text for text in ("topic:a", "group:a", "group:*", "topic:*", "cluster", "*") if _covers(asked, text)]
    assert covering == ["group:a", "group:*", "*"]


def _covers(asked: Asked, text: str) -> bool:
    return asked.is_covered_by(parse_resource(text))
