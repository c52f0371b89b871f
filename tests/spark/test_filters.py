"""Filters: what brokers are asked for, and what is filtered once more."""

import pyarrow as pa
import pytest

from martlet_spark.errors import OptionError
from martlet_spark.read.filters import Filter


def batch(**columns: list[str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: pa.array(values, pa.string()) for name, values in columns.items()})


def test_tags_are_compared_themselves() -> None:
    wanted = Filter(tags="a || b")
    assert wanted.fields(knows_like=True) == {"expressionType": "TAG", "subscription": "a || b"}
    found = wanted.select(batch(tag=["a", "ab", None, "b", "B"]))
    assert found.column("tag").to_pylist() == ["a", "b"]


def test_a_key_is_one_of_several() -> None:
    wanted = Filter(key="k1")
    keys = ["k1", "k11", "k0 k1", "k1 k2", "k0 k1 k2", None, "xk1", "K1"]
    assert wanted.select(batch(key=keys)).column("key").to_pylist() == ["k1", "k0 k1", "k1 k2", "k0 k1 k2"]
    assert wanted.fields(knows_like=False) == {"expressionType": "TAG", "subscription": "*"}


@pytest.mark.parametrize("tags", ["", "*", " "])
def test_no_filter_asks_for_everything(tags: str) -> None:
    wanted = Filter(tags=tags)
    assert wanted.is_everything
    assert wanted.fields(knows_like=True) == {"expressionType": "TAG", "subscription": "*"}


def test_sql_and_tags_apply_both() -> None:
    wanted = Filter(tags="a", sql="x > 1 OR y = 2", key="k")
    fields = wanted.fields(knows_like=True)
    assert fields["expressionType"] == "SQL92"
    assert str(fields["subscription"]).startswith("(x > 1 OR y = 2) AND (KEYS = 'k' OR ")
    assert wanted.columns == ("tag", "key")


@pytest.mark.parametrize("tags", ["a||b", "a || b", " a|| b ||", "||a||b||a"])
def test_bars_separate_tags_with_and_without_spaces(tags: str) -> None:
    """As in RocketMQ's FilterAPI."""
    assert Filter(tags=tags).fields(knows_like=True)["subscription"] == "a || b"


def test_all_beside_tags_is_refused() -> None:
    """RocketMQ compares it as a tag; a reader means all, and would get the others only."""
    for tags in ("paid || *", "*||paid"):
        with pytest.raises(OptionError, match=r"mixes '\*' with tags; leave '\*' out, or leave the option out for all"):
            Filter(tags=tags)


@pytest.mark.parametrize(
    "tags", ["TAGS = 'home||x'", "TAGS='a'", "price >= 5 || paid", "TAGS LIKE 'home/%'", "a <> 'b'"]
)
def test_an_expression_is_not_taken_for_tags(tags: str) -> None:
    with pytest.raises(OptionError, match="looks like SQL92; give it as option sql"):
        Filter(tags=tags)


@pytest.mark.parametrize("tags", ["a=b", "home/like this", "x>y || like", "it's in"])
def test_a_tag_may_have_what_sql_has(tags: str) -> None:
    assert not Filter(tags=tags).is_everything


@pytest.mark.parametrize(("tags", "key"), [("||", ""), ("", "a b")])
def test_a_filter_that_selects_nothing_is_refused(tags: str, key: str) -> None:
    with pytest.raises(OptionError):
        Filter(tags=tags, key=key)
