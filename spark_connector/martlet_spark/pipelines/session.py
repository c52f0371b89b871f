"""Opens a Spark session for the pipelines, and extracts the sentence of an error from Spark's traces."""

import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final

from martlet_spark.errors import OptionError, PipelineError, SparkConnectorError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_installed", "open_session", "plain_errors"]

# Text of one of this package's errors at the end of a Python trace that Spark put into its own error.
OWN_ERROR: Final = re.compile(r"^(?:[\w.]*: )*martlet(?:_\w+)?\.[\w.]*?(\w+): (.+)$", re.MULTILINE)
# Texts of errors of tasks that run another Python than this program, without the data source and its packages.
OTHER_PYTHON: Final = re.compile(r"DATA_SOURCE_NOT_FOUND|No module named '(?:martlet|pyspark)|Cannot run program")
# The error that ends a Python trace; the state of the query may follow.
TRACE: Final = re.compile(r"^.*Traceback \(most recent call last\):\n(?:[ \t].*\n)*(\S.*)", re.MULTILINE)
# The first lines of an error of Java that PySpark does not know.
CALL: Final = re.compile(r"An error occurred while calling [\w.]+$")
JAVA_CLASS: Final = re.compile(r"^: (?:[\w.$]+: )?")
# Configuration that lets Spark log only errors: else its warnings about the machine would be a user's first output.
LOGGING: Final = Path(__file__).with_name("log4j2.properties")
# Lines of Java, Spark and PySpark at each start that say nothing to a user of a pipeline.
NOISE: Final = re.compile(
    rb"WARNING: Using incubator modules|Setting default log level|To adjust logging level use sc"
    rb"|FutureWarning: PySpark does not yet fully support pandas|^\s+require_minimum_pandas_version\(\)"
)
SETTINGS: Final = {
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOGGING}",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}


def open_session(name: str, master: str = "", conf: Mapping[str, str] | None = None) -> "SparkSession":
    """Return the active Spark session, or a new one at *master*, else at the configured master, else local.

    Raises:
      PipelineError: PySpark or Java is not installed, or Spark cannot start.
    """
    check_installed()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from martlet_spark.session import configure

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(name)
    if master:
        builder = builder.master(master)
    for key, value in {**SETTINGS, **(conf or {})}.items():
        builder = builder.config(key, value)
    builder = configure(builder)
    try:
        _launch(builder)
        session = builder.getOrCreate()
    except (PySparkException, OSError) as error:
        raise PipelineError(f"Spark does not start: {_short(error)}; its own messages are above") from error
    session.sparkContext.setLogLevel("OFF")
    return session


def _launch(builder: "SparkSession.Builder") -> None:
    """Start Spark's JVM in a process group of its own, so that Ctrl-C reaches only the command, which ends Spark.

    Otherwise Ctrl-C would reach the Python processes of the JVM too, and each would print a traceback.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    # A running JVM is used, also that of spark-submit.
    if SparkContext._gateway is not None or {"SPARK_REMOTE", "PYSPARK_GATEWAY_PORT"} & {*os.environ}:
        return
    conf = SparkConf().setAll([*builder._options.items()])
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    read, write = os.pipe()
    passing = Thread(target=pass_on, args=(read,), daemon=True)
    passing.start()
    try:
        gateway = launch_gateway(conf, {"process_group": 0, "stderr": write})  # type: ignore[no-untyped-call]
    except BaseException:
        os.close(write)
        passing.join(1)  # Spark has printed why it does not start
        raise
    os.close(write)
    SparkContext(conf=conf, gateway=gateway)


def pass_on(descriptor: int) -> None:
    """Copy the pipe *descriptor* to stderr, without `NOISE`, until its other side is closed."""
    with open(descriptor, "rb") as lines:
        for line in lines:
            if not NOISE.search(line):
                sys.stderr.write(line.decode("utf-8", "replace"))
                sys.stderr.flush()


def check_installed() -> None:
    """Raise `PipelineError` if a package, or Java, is missing."""
    missing = [name for name in ("pyspark", "pyarrow", "numpy") if find_spec(name) is None]
    if missing:
        raise PipelineError(f"{missing[0]} is not installed, and pipelines need it; pip install 'martlet[spark]'")
    home = os.environ.get("JAVA_HOME")
    if shutil.which(os.path.join(home, "bin", "java") if home else "java") is None:
        where = f"JAVA_HOME {home!r} has no bin/java" if home else "java is not installed"
        raise PipelineError(f"{where}, and Spark needs it; install Java 17 or later, such as openjdk-17-jre-headless")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn an error of Spark into one with a single sentence.

    Raises:
      PipelineError: the pipeline failed.
      OptionError: an option of the source is invalid.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise _explain_error(error) from error


def _explain_error(error: Exception) -> SparkConnectorError:
    text = str(error)
    own_errors = OWN_ERROR.findall(text)
    if not own_errors and OTHER_PYTHON.search(text):
        python = os.environ.get("PYSPARK_DRIVER_PYTHON") or os.environ.get("PYSPARK_PYTHON") or "python3"
        where = f"Spark runs Python as {python!r}, which on one of its machines does not exist or lacks this package"
        hint = "install the package on all of them at the same path, and name its Python in PYSPARK_PYTHON"
        return PipelineError(f"{where}: {_short(error)}; {hint}")
    if not own_errors:
        return PipelineError(f"Spark failed: {_short(error)}")
    kind, text = own_errors[-1]
    return OptionError(text) if kind == "OptionError" else PipelineError(text)


def _short(error: Exception) -> str:
    """Return the first line of *error*, or of the Python error in it if it contains a trace."""
    lines = [line.strip() for line in str(error).split("\n\nJVM stacktrace")[0].splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if CALL.match(lines[0]) and len(lines) > 1:
        return JAVA_CLASS.sub("", lines[1])  # the first line only says that Java raised an error
    traces = TRACE.findall(str(error))
    return str(traces[-1]) if traces else lines[0]
