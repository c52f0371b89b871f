"""Options for each JVM that a test starts through Spark, which runs for seconds: one quick compiler, one collector.

With the class archive that `python -m tests.spark.training` writes, it starts with 40 % less processor time.
"""

import os
import sys
from pathlib import Path
from typing import Final

import pyspark
from tests.interop import class_archives

# For Spark itself: a query of a test is small, and compiling it takes longer than running it.
INTERPRETED: Final = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}

QUICK: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def archive() -> Path:
    """Return where the class archive of Spark is: in the virtual environment that has Spark, whose jars it is for."""
    jars = Path(pyspark.__file__).parent / "jars"
    return class_archives.archive("spark", [jars], Path(sys.prefix) / "share" / "martlet-tests")


def set_options() -> None:
    """Give the options to each JVM that Spark starts for this process and its children."""
    options = " ".join([QUICK, *class_archives.words(archive())])
    os.environ.update({"SPARK_SUBMIT_OPTS": options, "SPARK_LAUNCHER_OPTS": QUICK})


def pipeline_settings(warehouse: str) -> list[str]:
    """Return the options of a small declarative pipeline whose tables are in the folder *warehouse*."""
    settings = {"spark.sql.warehouse.dir": warehouse, "spark.sql.shuffle.partitions": "2", **INTERPRETED}
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
