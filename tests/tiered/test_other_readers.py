"""Other programs read the table as docs/history.md says, and find each message that was uploaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_delta
import pytest

from .histories import BLOCKS, History, make_history, run


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return make_history(tmp_path_factory.mktemp("history"))


def digest(rows: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Return *rows* in the order of their first columns, with bytes."""
    return sorted(tuple(bytes(value) if isinstance(value, bytearray) else value for value in row) for row in rows)


def expected(history: History) -> list[tuple[object, ...]]:
    return sorted(
        (each.record.topic, each.record.queue_id, each.record.queue_offset, each.body) for each in history.messages
    )


def test_the_page_has_an_example_for_each_program() -> None:
    assert list(BLOCKS) == ["DuckDB", "Polars", "PyArrow", "Rows of messages", "PySpark", "Records"]


def connect() -> duckdb.DuckDBPyConnection:
    """Return a connection that knows Delta, without a download."""
    [extension] = Path(duckdb_extension_delta.__path__[0]).rglob("delta.duckdb_extension")
    connection = duckdb.connect()
    connection.execute(f"LOAD '{extension}'")
    return connection


class _Known:
    """What the example of DuckDB gets as a connection: the extension is there already."""

    def __init__(self) -> None:
        self._connection = connect()

    def sql(self, text: str) -> Any:
        return None if text in ("INSTALL delta", "LOAD delta") else self._connection.sql(text)


def test_duckdb(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = history.of("Orders")
    with monkeypatch.context() as patched:
        known = _Known()
        patched.setattr(duckdb, "connect", lambda: known)
        [found] = run("DuckDB", history)
    assert found == ("Orders", 1500, sum(len(each.body) for each in orders), max(each.total for each in orders))
    rows = connect().sql(f"SELECT topic, queue, \"offset\", body FROM delta_scan('{history.url}')").fetchall()
    assert digest(rows) == expected(history)


def test_polars(history: History) -> None:
    import polars as pl

    assert run("Polars", history) == [(1500, max(each.total for each in history.of("Orders")))]
    rows = pl.scan_delta(history.url).select("topic", "queue", "offset", "body").collect().rows()
    assert digest(rows) == expected(history)


def test_pyarrow(history: History) -> None:
    count, [key] = run("PyArrow", history)
    assert count == len(history.of("Orders", 0))
    assert str(key) in {f"order-{number}" for number in range(0, 3000, 8)}


def test_rows_of_messages(history: History) -> None:
    assert run("Rows of messages", history) == len(history.of("Orders"))


def test_records_come_back_byte_for_byte(history: History) -> None:
    found = [(each.position, each.queue_offset, each.body, each.properties) for each in run("Records", history)]
    kept = [each.record for each in history.of("Orders", 0)]
    assert found == [(each.position, each.queue_offset, each.body, each.properties) for each in kept]
