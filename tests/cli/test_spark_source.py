"""An installed Martlet, from a wheel in CI, has the data source where Spark looks for it, and all of its files."""

import os
import re
import sysconfig
from importlib import import_module, resources
from importlib.metadata import distribution, entry_points
from pathlib import Path
from pkgutil import iter_modules

from pyspark.sql.datasource import DataSource


def test_spark_finds_the_data_source() -> None:
    """As Spark does before its first query: in packages at the top level, of the environment that runs the program."""
    sources: dict[str, type[DataSource]] = {}
    for info in iter_modules():
        if info.name.startswith("pyspark_"):
            module = import_module(info.name)
            sources[module.DefaultSource.name()] = module.DefaultSource
            if "MARTLET_WHEEL" in os.environ:
                assert Path(str(module.__file__)).is_relative_to(sysconfig.get_path("purelib"))
    found = sources["martlet"]
    assert issubclass(found, DataSource)
    # Tasks get it pickled, by this name.
    assert getattr(import_module(found.__module__), found.__qualname__) is found
    assert found.__module__ == "martlet_spark.source"


def test_the_pipelines_have_what_they_read() -> None:
    assert "rootLogger.level" in (resources.files("martlet_spark.pipelines") / "log4j2.properties").read_text()


def test_what_spark_needs_is_an_extra() -> None:
    texts = distribution("martlet").requires or []
    wanted = [re.split(r"[^\w-]", text)[0] for text in texts if re.search("extra == .spark", text)]
    assert {*wanted} == {"pyspark", "pyarrow", "numpy", "lz4", "zstandard"}


def test_the_commands_of_the_pipelines_are_those_of_a_plugin() -> None:
    (plugin,) = entry_points(group="martlet.plugins", name="spark")
    assert plugin.load().__name__ == "SparkPlugin"
