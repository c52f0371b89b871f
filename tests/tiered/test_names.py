"""Names of objects: what is written is read back, and nothing else is."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet_tiered.names import DataName, commit_name, parse_commit, parse_data, probe_name

DATES = st.dates().map(str)
KINDS = st.sampled_from(["topic", "retry", "dlq", "internal"])
NUMBERS = st.integers(0, 10**19 - 1)


@given(DATES, KINDS, st.integers(1, 10**19 - 1), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_a_name_is_read_back(date: str, kind: str, epoch: int, begin: int, end: int, rewrite: int, part: int) -> None:
    begin, end = sorted((begin, end))
    name = DataName(date, kind, epoch, begin, end, rewrite, part if rewrite else 0)  # type: ignore[arg-type]
    assert parse_data(name.path) == (name if begin < end else None)


def test_names_are_those_of_the_documentation() -> None:
    uploaded = DataName("2026-11-28", "topic", 3, 0, 268_435_456)
    assert uploaded.path == "date=2026-11-28/kind=topic/e3-0-268435456.parquet"
    rewritten = DataName("2026-11-28", "dlq", 3, 0, 536_870_912, 7)
    assert rewritten.path == "date=2026-11-28/kind=dlq/e3-0-536870912-r7-0.parquet"
    assert commit_name(7) == "table/_delta_log/00000000000000000007.json"
    assert probe_name("ab") == "probe/ab"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "date=2026-11-28/kind=topic/e1-0-5",
        "date=2026-11-28/kind=topic/e1-0-5.parquet.tmp",
        "date=2026-11-28/kind=topic/e1-0-5.parquet\n",
        "/date=2026-11-28/kind=topic/e1-0-5.parquet",
        "table/date=2026-11-28/kind=topic/e1-0-5.parquet",
        "date=2026-02-30/kind=topic/e1-0-5.parquet",
        "date=2026-11-28/kind=other/e1-0-5.parquet",
        "kind=topic/date=2026-11-28/e1-0-5.parquet",
        "date=2026-11-28/kind=topic/e0-0-5.parquet",  # nobody owns epoch 0
        "date=2026-11-28/kind=topic/e1-5-5.parquet",
        "date=2026-11-28/kind=topic/e1-6-5.parquet",
        "date=2026-11-28/kind=topic/e01-0-5.parquet",
        "date=2026-11-28/kind=topic/e1-00-5.parquet",
        "date=2026-11-28/kind=topic/e1--1-5.parquet",
        "date=2026-11-28/kind=topic/e1-0-5-r0-0.parquet",
        "date=2026-11-28/kind=topic/e1-0-5-r1.parquet",
        "date=2026-11-28/kind=topic/e1-0-\u0665.parquet",
        "date=2026-11-28/kind=topic/e1-0-99999999999999999999.parquet",
        "date=2026-11-28/kind=topic/part-00000-0f7.zstd.parquet",
    ],
)
def test_no_other_name_is_read(path: str) -> None:
    assert parse_data(path) is None


@given(st.text(string.printable))
def test_what_is_read_is_what_is_written(path: str) -> None:
    name = parse_data(path)
    assert name is None or name.path == path


def test_only_commits_are_read_as_commits() -> None:
    assert parse_commit(commit_name(123)) == 123
    for name in ("7.json", "table/_delta_log/7.json", "table/00000000000000000007.json", commit_name(7) + ".tmp"):
        assert parse_commit(name) is None
