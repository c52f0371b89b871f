"""The five fields of a schedule, as ActiveMQ's CronParser understands them."""

import re
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from martlet_timer.timers.cron import Cron

UTC = ZoneInfo("UTC")
BERLIN = ZoneInfo("Europe/Berlin")
MINUTE_MS = 60_000


def ms(text: str, zone: ZoneInfo = UTC, fold: int = 0) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp() * 1000)


def local(moment_ms: int, zone: ZoneInfo = UTC) -> str:
    return datetime.fromtimestamp(moment_ms / 1000, zone).strftime("%Y-%m-%d %H:%M:%S")


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        # All but the last ones are what ActiveMQ's CronParser answers, too.
        ("* * * * *", "2026-03-05 10:15:30", "2026-03-05 10:16:00"),
        ("* * * * *", "2026-03-05 10:15:00", "2026-03-05 10:16:00"),
        ("? ? ? ? ?", "2026-12-31 23:59:59", "2027-01-01 00:00:00"),
        ("30 * * * *", "2026-03-05 10:30:00", "2026-03-05 11:30:00"),
        ("0 1 * * *", "1972-03-02 17:10:00", "1972-03-03 01:00:00"),
        ("*/15 * * * *", "2026-03-05 10:46:00", "2026-03-05 11:00:00"),
        ("5,10,55 * * * *", "2026-03-05 10:11:00", "2026-03-05 10:55:00"),
        ("10-12 * * * *", "2026-03-05 10:12:30", "2026-03-05 11:10:00"),
        ("0-30/7 * * * *", "2026-03-05 10:07:00", "2026-03-05 10:14:00"),
        ("* * * * 5", "2010-11-15 09:15:30", "2010-11-19 00:00:00"),
        ("50 20 * * 5", "2011-03-07 09:15:30", "2011-03-11 20:50:00"),
        ("50 20 * * 5", "2011-03-11 22:00:30", "2011-03-18 20:50:00"),
        ("0 20 * 4,5 0", "2011-03-07 09:15:30", "2011-04-03 20:00:00"),
        ("0 20 * 4,5 0", "2011-04-30 22:00:30", "2011-05-01 20:00:00"),
        ("0 20 * 4,5 0", "2011-05-30 22:00:30", "2012-04-01 20:00:00"),
        ("* * * 12 *", "2010-11-15 09:15:30", "2010-12-01 00:00:00"),
        ("* * 1 * *", "2010-12-15 09:15:30", "2011-01-01 00:00:00"),
        ("* * 1 12 *", "2010-12-15 09:15:30", "2011-12-01 00:00:00"),
        ("* * 16 * *", "2010-11-15 09:15:30", "2010-11-16 00:00:00"),
        ("0 0 */2 * *", "2026-03-30 12:00:00", "2026-04-02 00:00:00"),
        ("0 0 29 2 *", "2025-03-01 00:00:00", "2028-02-29 00:00:00"),
        ("0 12 * * 0", "2026-03-05 10:00:00", "2026-03-08 12:00:00"),
        # There ActiveMQ comes at 03:44, a time that the schedule has, but not the first one.
        ("* 3 * * *", "2027-08-06 02:43:43", "2027-08-06 03:00:00"),
        # There ActiveMQ comes on July 1.
        ("0 0 31 6,12 *", "2027-01-20 02:04:00", "2027-12-31 00:00:00"),
        # Either day counts; ActiveMQ comes on March 13 and October 16.
        ("0 0 13 * 5", "2026-03-01 00:00:00", "2026-03-06 00:00:00"),
        ("0 0 13 * 5", "2026-10-09 00:00:00", "2026-10-13 00:00:00"),
        ("0 0 29 2 *", "2096-03-01 00:00:00", "2104-02-29 00:00:00"),
    ],
)
def test_the_next_time(text: str, after: str, expected: str) -> None:
    assert local(Cron(text).next_ms(ms(after), UTC)) == expected


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        # The clocks go forward from 2 to 3.
        ("30 2 * * *", ms("2026-03-28 03:00", BERLIN), "2026-03-30 02:30:00"),
        ("*/30 * * * *", ms("2026-03-29 01:30", BERLIN), "2026-03-29 03:00:00"),
        # And back from 3 to 2.
        ("*/30 * * * *", ms("2026-10-25 02:30", BERLIN), "2026-10-25 02:00:00"),
        ("30 2 * * *", ms("2026-10-25 02:30", BERLIN), "2026-10-25 02:30:00"),
        ("30 2 * * *", ms("2026-10-25 02:30", BERLIN, fold=1), "2026-10-26 02:30:00"),
    ],
)
def test_changes_of_the_clocks(text: str, after: int, expected: str) -> None:
    found = Cron(text).next_ms(after, BERLIN)
    assert found > after
    assert local(found, BERLIN) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("* * * * *", 1), ("0 * * * *", 60), ("0,10 * * * *", 10), ("55,5 * * * *", 10), ("0 0 1 * *", 1440)],
)
def test_the_shortest_interval(text: str, expected: int) -> None:
    assert Cron(text).shortest_ms() == expected * MINUTE_MS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "schedule '' has not the 5 fields minute, hour, day of month, month, day of week"),
        ("* * * *", "has not the 5 fields"),
        ("* * * * * *", "has not the 5 fields"),
        (f"{'1,' * 200}1 * * * *", "has not the 5 fields"),
        ("60 * * * *", "schedule has the minute '60'; use 0 to 59"),
        ("* 24 * * *", "schedule has the hour '24'; use 0 to 23"),
        ("* * 0 * *", "schedule has the day of month '0'; use 1 to 31"),
        ("* * * 13 *", "schedule has the month '13'; use 1 to 12"),
        ("* * * * 7", "schedule has the day of week '7'; use 0 to 6; 0 is Sunday"),
        ("* * * * MON", "schedule has the day of week 'MON'; use numbers"),
        ("5-1 * * * *", "schedule has the minute '5-1'; use 0 to 59"),
        ("-1 * * * *", "schedule has the minute '-1'; use numbers"),
        ("1, * * * *", "schedule has the minute ''; use numbers"),
        ("\u0661 * * * *", "use numbers"),
        ("*/0 * * * *", "schedule has the minute '*/0'; write a number after the slash"),
        ("*/x * * * *", "write a number after the slash"),
        ("*/5,3 * * * *", "write a number after the slash"),
        ("7/5 * * * *", "schedule has the minute '7/5', which never comes; 5 divides none"),
    ],
)
def test_a_wrong_schedule_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Cron(text)


def test_a_day_that_no_month_has_never_comes() -> None:
    with pytest.raises(ValueError, match="schedule never comes; its days are in none of its months"):
        Cron("0 0 30 2 *").next_ms(ms("2026-01-01"), UTC)
