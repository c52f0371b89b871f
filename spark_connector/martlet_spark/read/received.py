"""Records as brokers send them: damaged ones, and those of other messages than were asked for, fail the read."""

from typing import final

import numpy as np

from martlet_columns.errors import RecordError
from martlet_columns.records import Data, Records
from martlet_spark.errors import ReadError

__all__ = ["Damaged", "check_bodies", "check_range", "received_records"]


@final
class Damaged(ReadError):
    """Records do not match their CRCs; the text names the records only."""


def received_records(data: Data) -> Records:
    """Return the records in *data*, the body of an answer.

    Raises:
      ReadError: the sizes of the records do not add up to the size of *data*.
    """
    try:
        return Records(data)
    except RecordError as error:
        raise ReadError(f"{error}; the broker sent damaged data") from error


def check_range(records: Records, queue: int, first: int, end: int) -> None:
    """Check that *records* are messages of *queue* with ascending offsets from *first* up to *end*.

    Raises:
      ReadError: a record is not.
    """
    offsets = records.heads["offset"]
    asked = (records.heads["queue"] == queue) & (offsets >= first) & (offsets < end)
    asked[1:] &= offsets[1:] > offsets[:-1]
    if not asked.all():
        head = records.heads[int(np.flatnonzero(~asked)[0])]
        text = f"the broker sent message {head['offset']} of queue {head['queue']} in an answer"
        raise ReadError(f"{text} with messages {first} to {end - 1} of queue {queue}; see 'martlet store verify'")


def check_bodies(records: Records) -> None:
    """Compare each of *records* with its CRCs.

    Raises:
      Damaged: a record does not match, or lacks its end.
    """
    try:
        records.check_bodies()
    except RecordError as error:
        raise Damaged(str(error)) from error
