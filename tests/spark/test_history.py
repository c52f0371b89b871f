"""Spark reads the table of the cold tier as docs/history.md says."""

from pathlib import Path

from pyspark.sql import SparkSession
from tests.tiered.histories import make_history, run


def test_spark_reads_the_table_by_its_files(spark: SparkSession, tmp_path: Path) -> None:
    history = make_history(tmp_path)
    [[count, top]] = run("PySpark", history).collect()
    orders = history.of("Orders")
    assert (count, float(top)) == (len(orders), max(each.total for each in orders))
