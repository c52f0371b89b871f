"""Treats messages that a query should have read and that are gone, as its options say."""

import logging

from martlet_spark.errors import DataLost

__all__ = ["lose"]

log = logging.getLogger("martlet.spark")


def lose(text: str, *, fails: bool) -> None:
    """Raise `DataLost` with *text* if the query *fails* on loss; otherwise log a warning."""
    if fails:
        raise DataLost(f"{text}; set failOnDataLoss to false to continue without them")
    log.warning("%s; continuing", text)
