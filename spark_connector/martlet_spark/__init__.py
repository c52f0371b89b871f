"""Spark reads and writes Martlet and RocketMQ topics: a data source in pure Python."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from martlet_spark.arrow import read_arrow
    from martlet_spark.copies import own_properties
    from martlet_spark.read.lag import Lag, LagListener
    from martlet_spark.session import configure

__all__ = ["Lag", "LagListener", "configure", "own_properties", "read_arrow"]

# Names are imported on first use: PySpark takes 0.3 s, and commands of `martlet` import modules of this package.
_HOMES: Final = {
    "Lag": "read.lag",
    "LagListener": "read.lag",
    "configure": "session",
    "own_properties": "copies",
    "read_arrow": "arrow",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
