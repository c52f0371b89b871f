"""Records of an answer: only those that were asked for are read."""

import pytest
from tests.columns.stored import records, usual

from martlet_columns.records import joined
from martlet_spark.errors import ReadError
from martlet_spark.read.received import check_range, received_records


def test_messages_that_were_not_asked_for_are_refused() -> None:
    found = records([usual(number) for number in range(5)], first=10)
    check_range(found, 3, 10, 15)
    for queue, first, end, bad in ((4, 10, 15, 10), (3, 11, 15, 10), (3, 10, 14, 14)):
        with pytest.raises(ReadError, match=f"the broker sent message {bad} of queue 3"):
            check_range(found, queue, first, end)
    twice = joined([found, found])
    with pytest.raises(ReadError, match="the broker sent message 10 of queue 3"):
        check_range(twice, 3, 10, 15)


def test_an_answer_whose_records_do_not_add_up_is_refused() -> None:
    data = records([usual(number) for number in range(3)]).data
    with pytest.raises(ReadError, match=r"records say \d+ bytes in total; \d+ are there; the broker sent damaged data"):
        received_records(data[:-1])
