"""Lets Spark find the data source ``martlet``: it looks for packages whose names begin with ``pyspark_``."""

from martlet_spark.source import MartletDataSource as DefaultSource

__all__ = ["DefaultSource"]
