"""The table of normative statements: in few words, and with a test for each that binds a server."""

from pathlib import Path

import pytest
from tests.stomp.normative import ROOT, STATEMENTS, WORDS_MAX, defined_tests, page, shown_by, statement

from martlet_stomp.wire.packets import Version


def test_each_statement_is_summed_up_in_a_few_words() -> None:
    assert [each.number for each in STATEMENTS.values() if not 3 <= len(each.summary.split()) <= WORDS_MAX] == []


def test_each_statement_that_binds_a_server_has_a_test() -> None:
    tests = shown_by()
    assert [each.number for each in STATEMENTS.values() if each.binds_a_server and not tests.get(each.number)] == []


def test_every_test_in_the_table_exists() -> None:
    for names in shown_by().values():
        for name in names:
            path, _, test = name.partition("::")
            assert test in defined_tests(ROOT / path), name


def test_a_statement_that_does_not_exist_cannot_be_shown() -> None:
    with pytest.raises(LookupError, match=r"STOMP-1\.2-SEND-9"):
        statement(Version.V1_2, "SEND-9")


def test_the_page_is_up_to_date() -> None:
    made = "run: python -m tests.stomp.normative > docs/stomp-conformance.md"
    assert (ROOT / "docs" / "stomp-conformance.md").read_text() == page(), made


def test_the_page_has_a_row_for_each_statement() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| STOMP-")]
    assert len(rows) == len(STATEMENTS)
    row = "| STOMP-1.2-frames-2 | both | lines end with LF, or CR LF | `test_normative_frames.py::test_lines_end_with"
    assert row in page()


def test_the_marks_name_files_of_the_tree() -> None:
    assert {Path(name.partition("::")[0]).parent for names in shown_by().values() for name in names} == {
        Path("tests/stomp")
    }
