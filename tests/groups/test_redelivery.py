from itertools import pairwise

from martlet.groups.strategy.redelivery import pause_ms


def test_sixteen_retries_take_about_a_minute_in_steps_that_grow_to_seconds() -> None:
    ladder = [pause_ms(failures) for failures in range(1, 17)]
    assert ladder[:6] == [250, 500, 1000, 2000, 4000, 5000]
    assert all(before <= after <= 2 * before for before, after in pairwise(ladder))
    assert 60_000 <= sum(ladder) <= 90_000


def test_what_has_not_failed_does_not_wait() -> None:
    assert (pause_ms(0), pause_ms(-1)) == (0, 0)


def test_a_record_that_failed_as_often_as_it_can_say_waits_no_longer_than_the_others() -> None:
    assert pause_ms((1 << 31) - 1) == pause_ms(16)
