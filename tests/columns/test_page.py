"""docs/columns.md has the columns as they are."""

import re
from pathlib import Path

import pyarrow as pa

from martlet_columns.schema import COLUMNS, exact_schema
from martlet_spark.pipelines.archived import arrow_schema

PAGE = (Path(__file__).parents[2] / "docs" / "columns.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (\w*) ?\| (\w*) ?\|", PAGE, re.MULTILINE)


def shown(kind: pa.DataType) -> str:
    return "date32" if pa.types.is_date32(kind) else re.sub(r" \('properties'\)", "", str(kind))


def test_the_page_has_the_columns_of_an_exact_table() -> None:
    assert [(name, kind) for name, kind, _, exact in ROWS if exact] == [
        (field.name, shown(field.type)) for field in exact_schema()
    ]


def test_the_page_has_the_columns_of_an_archive() -> None:
    archive = {name: kind for name, kind, archived, _ in ROWS if archived}
    assert archive == {field.name: shown(field.type) for field in arrow_schema()}
    assert {name for name, _, archived, _ in ROWS if archived == "partition"} == {"topic", "date"}
    assert archive.keys() == {*COLUMNS, "date"}
