"""What a Spark session needs for this source: `configure`."""

import os
import sys
from typing import Final

from pyspark.sql import SparkSession

__all__ = ["SETTINGS", "configure"]

SETTINGS: Final = {
    # Over loopback TCP each task with a Python worker takes 25 to 50 ms longer, and a row 10 to 20 % more time.
    "spark.python.unix.domain.socket.enabled": "true",
}


def configure(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Set what Spark needs to read and write topics fast on *builder*, and return it.

    ``spark = configure(SparkSession.builder.master("local[2]")).getOrCreate()``. The settings are Spark's own and count
    for a whole application, so they have no effect once its first session exists.

    With a local master, Spark's workers also get the Python of this process, unless ``PYSPARK_PYTHON`` names another:
    by default they use the first ``python3`` of the path, which need not have this package.
    """
    # PySpark reads this variable only; the setting spark.pyspark.python is for spark-submit.
    if getattr(builder, "_options", {}).get("spark.master", "local").startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    return builder
