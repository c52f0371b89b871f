"""Limits how many connections per second each address makes."""

from collections import OrderedDict
from typing import Final, final

__all__ = ["ConnectRates"]

# Connections that an address may make at once, if a second allows fewer: a RocketMQ client opens about five when it
# starts, and several clients of one machine start together.
BURST_MIN: Final = 10
# 5 MB. Whoever has more addresses is not limited by them anyway.
ORIGINS_MAX: Final = 32_768


@final
class ConnectRates:
    """The rates of new connections by origin (`martlet.net.origins.origin_of`).

    The generic cell rate algorithm, which keeps one number for each origin: the time until which its connections are
    paid for. Each costs a fixed time; an origin may be as far ahead of the clock as a burst costs.

    Args:
      a_second: connections per second, after a burst of as many, and of 10 at least.
    """

    def __init__(self, a_second: int) -> None:
        self._cost_s = 1 / a_second
        self._ahead_s = (max(a_second, BURST_MIN) - 1) / a_second
        self._paid_until: OrderedDict[bytes, float] = OrderedDict()  # in the order of the last connections

    def __len__(self) -> int:
        return len(self._paid_until)

    def take(self, origin: bytes, now: float) -> bool:
        """Count a connection of *origin* and return True; False if it makes too many."""
        known = self._paid_until
        paid_until = max(known.pop(origin, now), now)
        # A little more, because sums of costs are not exact.
        may_connect = paid_until - now <= self._ahead_s + self._cost_s / 1024
        known[origin] = paid_until + self._cost_s if may_connect else paid_until
        self._forget_paid(now)
        return may_connect

    def _forget_paid(self, now: float) -> None:
        """Forget up to two origins that are not ahead of the clock, or the first one if there are too many."""
        known = self._paid_until
        for _ in range(2):
            oldest = next(iter(known))
            if known[oldest] > now and len(known) <= ORIGINS_MAX:
                return
            del known[oldest]
