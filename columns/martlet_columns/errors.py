"""Errors of records and of tables; each text names the record."""

from martlet.errors import MartletError

__all__ = ["RecordError", "UndecodableBody"]


class RecordError(MartletError):
    """Bytes are no intact records, or a table has no rows of records."""


class UndecodableBody(RecordError):
    """The body of a record cannot be decompressed."""
