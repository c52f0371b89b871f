"""The table of normative statements: whole, in few words, and with a test for each that binds a server."""

from pathlib import Path

import pytest
from tests.mqtt.normative import ROOT, STATEMENTS, WORDS_MAX, defined_tests, page, shown_by, statement

from martlet_mqtt.wire.codes import V4, V5

# How many statements appendix B of each specification has.
COUNTS = {V4: 141, V5: 251}


@pytest.mark.parametrize("version", COUNTS)
def test_the_table_has_every_statement_of_a_version(version: int) -> None:
    assert len([each for each in STATEMENTS.values() if each.version == version]) == COUNTS[version]


def test_each_statement_is_summed_up_in_a_few_words() -> None:
    assert [each.number for each in STATEMENTS.values() if not 3 <= len(each.summary.split()) <= WORDS_MAX] == []


@pytest.mark.parametrize("version", COUNTS)
def test_each_statement_that_binds_a_server_has_a_test(version: int) -> None:
    tests = shown_by()
    bound = [each for each in STATEMENTS.values() if each.version == version and each.binds_a_server]
    assert [each.number for each in bound if not tests.get((version, each.number))] == []


def test_every_test_in_the_table_exists() -> None:
    for names in shown_by().values():
        for name in names:
            path, _, test = name.partition("::")
            assert test in defined_tests(ROOT / path), name


def test_a_statement_that_does_not_exist_cannot_be_shown() -> None:
    with pytest.raises(LookupError, match=r"MQTT-9\.9\.9-9"):
        statement(V5, "MQTT-9.9.9-9")


def test_the_page_is_up_to_date() -> None:
    made = "run: python -m tests.mqtt.normative > docs/mqtt-conformance.md"
    assert (ROOT / "docs" / "mqtt-conformance.md").read_text() == page(), made


def test_the_page_has_a_row_for_each_statement() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| MQTT-")]
    assert len(rows) == len(STATEMENTS)
    assert (
        "| MQTT-3.12.4-1 | server | PINGREQ is answered with PINGRESP | `test_normative_end.py::test_pingreq" in page()
    )


def test_the_marks_name_files_of_the_tree() -> None:
    assert {Path(name.partition("::")[0]).parent for names in shown_by().values() for name in names} == {
        Path("tests/mqtt")
    }
