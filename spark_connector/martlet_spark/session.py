"""Settings of a Spark session for this source: `configure`."""

import os
import re
import sys
from typing import Final

from pyspark.sql import SparkSession

__all__ = ["SETTINGS", "configure"]

SETTINGS: Final = {
    # Over loopback TCP each task with a Python worker takes 25 to 50 ms longer, and a row 10 to 20 % more time.
    "spark.python.unix.domain.socket.enabled": "true",
}


def configure(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Set the options for fast reads and writes of topics on *builder*, and return it.

    ``spark = configure(SparkSession.builder.master("local[2]")).getOrCreate()``. The settings are Spark's own and apply
    to a whole application, so they have no effect once its first session exists.

    With a local master, Spark's workers also get the Python of this process, unless ``PYSPARK_PYTHON`` names another:
    by default they use the first ``python3`` of the path, which need not have this package.
    """
    # PySpark reads only this variable; the setting spark.pyspark.python is for spark-submit.
    if _is_local(builder):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    return builder


def _is_local(builder: SparkSession.Builder) -> bool:
    """Whether the application runs only on this machine, as far as is known before it begins."""
    master = getattr(builder, "_options", {}).get("spark.master")
    if master is None and "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has started this process
        return False
    return str(master or _default_master()).startswith("local")


def _default_master() -> str:
    """Return the master from Spark's own files and variables; a local one if they name none."""
    if "--master" in os.environ.get("PYSPARK_SUBMIT_ARGS", ""):
        return os.environ["PYSPARK_SUBMIT_ARGS"].partition("--master")[2].lstrip(" =")
    home = os.environ.get("SPARK_HOME", "")
    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(home, "conf")
    if not os.path.isabs(folder):
        return "local"
    try:
        with open(os.path.join(folder, "spark-defaults.conf"), encoding="utf-8") as file:
            found = re.findall(r"^\s*spark\.master[\s=:]+(\S+)", file.read(), re.MULTILINE)
    except OSError:
        found = []
    return str(found[-1]) if found else "local"
