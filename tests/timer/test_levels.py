"""The table of delay levels: what its notation means, and what is refused."""

import pytest

from martlet.errors import ConfigError
from martlet_timer.config import TimerConfig
from martlet_timer.levels.stage import parse_levels
from martlet_timer.plugin import TimerPlugin


def test_the_default_table_is_that_of_rocketmq() -> None:
    minutes = [60_000 * minutes for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)]
    assert TimerPlugin(TimerConfig()).delays_ms == (1000, 5000, 10_000, 30_000, *minutes)


def test_a_table_has_seconds_minutes_hours_and_days() -> None:
    assert parse_levels(" 0s 7m\t3h  9999d ") == (0, 420_000, 10_800_000, 9999 * 86_400_000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "timer.levels '' has 0 delays; give 1 to 256"),
        ("1s " * 257, "has 257 delays; give 1 to 256"),
        ("1s 5", "timer.levels has '5', which is no delay; write up to 4 digits and s, m, h or d"),
        ("1ms", "timer.levels has '1ms'"),
        ("-1s", "timer.levels has '-1s'"),
        ("10000s", "timer.levels has '10000s'"),
    ],
)
def test_a_wrong_table_is_refused_with_the_word_that_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TimerPlugin(TimerConfig(levels=text))
    assert reason in str(refused.value)
