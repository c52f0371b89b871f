"""Each condition of the table: its verdict, or the character that its refusal points at."""

import re

import pytest

from martlet.errors import Reason, Refused
from martlet_filter_sql92.compiler import compile_tree
from martlet_filter_sql92.parser import parse

from .reference import condition
from .table import Case, cases

CASES = cases()


class Values(dict[str, str]):
    def property(self, name: str) -> str | None:
        return self.get(name)


def test_the_table_is_large() -> None:
    assert len(CASES) >= 500
    assert sum(case.verdict is None and not case.refused_at for case in CASES) >= 50


@pytest.mark.parametrize("case", [case for case in CASES if not case.refused_at], ids=str)
def test_a_condition_has_its_verdict(case: Case) -> None:
    tree, values = parse(case.text), Values(case.properties)
    assert compile_tree(tree)(values) is case.verdict
    assert condition(tree, values) is case.verdict


@pytest.mark.parametrize("case", [case for case in CASES if case.refused_at], ids=str)
def test_a_refusal_points_at_the_character(case: Case) -> None:
    with pytest.raises(Refused) as caught:
        parse(case.text)
    assert caught.value.reason is Reason.ILLEGAL
    found = re.search(r"at character (\d+)", str(caught.value))
    assert found is not None
    assert int(found[1]) == case.refused_at, str(caught.value)
