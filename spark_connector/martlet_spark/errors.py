"""Errors that fail a query; each text says what to do."""

from martlet.errors import MartletError

__all__ = ["DataLost", "OptionError", "PipelineError", "ReadError", "SparkConnectorError", "WriteError"]


class SparkConnectorError(MartletError):
    """A query cannot start or continue."""


class OptionError(SparkConnectorError):
    """An option is unknown, missing or has an invalid value."""


class ReadError(SparkConnectorError):
    """The brokers cannot be read, or a record is damaged."""


class DataLost(SparkConnectorError):
    """Unread messages were removed, or a topic has other messages than the checkpoint says."""


class WriteError(SparkConnectorError):
    """A row cannot be a message, or the brokers do not accept it."""


class PipelineError(SparkConnectorError):
    """A pipeline cannot run, or failed."""
