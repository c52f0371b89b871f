"""Errors out of Spark's traces: a pipeline ends with one sentence, without a JVM here."""

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from martlet_spark.errors import OptionError, PipelineError, SparkConnectorError
from martlet_spark.pipelines.session import plain_errors

NOT_FOUND = """An error occurred while calling o57.load.
: org.apache.spark.SparkException: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: martlet
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.dataSourceNotFoundError(QueryExecutionErrors.scala:770)
"""
NO_PYTHON = """An error occurred while calling o57.load.
: java.io.IOException: Cannot run program "/opt/none/python": error=2, No such file or directory
\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)
"""
OTHER = """An error occurred while calling o12.start.
: java.lang.IllegalStateException: the context is stopped
\tat org.apache.spark.SparkContext.assertNotStopped(SparkContext.scala:1)
"""
NO_MODULE = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times:
Traceback (most recent call last):
  File "worker.py", line 1, in read
ModuleNotFoundError: No module named 'martlet_spark'
"""
OF_A_STREAM = """[STREAM_FAILED] Query [id = 1] failed: Traceback (most recent call last):
  File "archive_sink.py", line 71, in commit
    raise KeyError("a")
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "archive_sink.py", line 73, in commit
    import deltalake
ImportError: cannot import name 'AddAction'
 SQLSTATE: 38000
=== Streaming Query ===
Identifier: [id = 1]
Logical Plan:
+- ~StreamingDataSourceV2ScanRelation[topic#464] martlet
"""
OWN = """[STREAM_FAILED] Query terminated with exception: Traceback (most recent call last):
  File "stream.py", line 1, in latestOffset
martlet_spark.errors.DataLost: messages 0 to 3 are gone; set failOnDataLoss to false
"""


def plain(error: Exception) -> SparkConnectorError:
    with pytest.raises(SparkConnectorError) as caught, plain_errors():
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (NOT_FOUND, "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: martlet"),
        (NO_PYTHON, 'Cannot run program "/opt/none/python": error=2, No such file or directory'),
        (NO_MODULE, "ModuleNotFoundError: No module named 'martlet_spark'"),
    ],
)
def test_a_python_without_the_package_is_named(monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    """Spark takes PYSPARK_DRIVER_PYTHON for data sources, on executors too, and PYSPARK_PYTHON without it."""
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    where = "which on one of its machines does not exist or lacks this package"
    hint = "install the package on all of them at the same path, and name its Python in PYSPARK_PYTHON"
    for name, python in ((None, "python3"), ("PYSPARK_PYTHON", "/opt/a"), ("PYSPARK_DRIVER_PYTHON", "/opt/b")):
        if name is not None:
            monkeypatch.setenv(name, python)
        found = plain(Py4JError(text))
        assert str(found) == f"Spark runs Python as '{python}', {where}: {why}; {hint}"


def test_an_error_of_java_is_its_message() -> None:
    assert str(plain(Py4JError(OTHER))) == "Spark failed: the context is stopped"


def test_an_error_of_python_in_a_stream_is_its_line() -> None:
    assert str(plain(PySparkException(OF_A_STREAM))) == "Spark failed: ImportError: cannot import name 'AddAction'"


def test_an_error_of_this_package_is_shown_alone() -> None:
    found = plain(PySparkException(OWN))
    assert isinstance(found, PipelineError)
    assert str(found) == "messages 0 to 3 are gone; set failOnDataLoss to false"
    wrong = OWN.replace("DataLost: messages 0 to 3 are gone; set failOnDataLoss to false", "OptionError: option x")
    assert isinstance(plain(PySparkException(wrong)), OptionError)
