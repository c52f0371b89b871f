"""Quotas of a test, and how fast what it sends or receives has come."""

from collections.abc import Sequence

import pytest
import trio

from martlet.broker import Broker
from martlet.contracts import Credentials, Identity, LoginOrigin, Password, Quota
from martlet.errors import Reason, Refused

__all__ = ["Progress", "give", "know", "used"]

GROUPS = ("staff",)


def give(broker: Broker, *everybody: Quota, **quotas: Sequence[Quota]) -> None:
    """Give clients without a name *everybody*, and each user its *quotas*."""
    table = {"": everybody, **quotas}
    broker.quotas.sources = (lambda identity: table.get(identity.name, ()),)


def know(broker: Broker) -> None:
    """Let *broker* know each user who has the own name as password."""

    def believe(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
        if not isinstance(credentials, Password):
            return None
        if credentials.password != credentials.user.encode():
            raise Refused(Reason.CREDENTIALS, "the password is wrong")
        return Identity(credentials.user)

    broker.authentication.authenticators = (believe,)


def used(broker: Broker) -> tuple[int, int]:
    """Return the ms of pauses, and the refusals, of all quotas."""
    statistics = broker.quotas.statistics()
    slowed_ms, refused = statistics["slowed_ms"], statistics["refused"]
    assert isinstance(slowed_ms, int)
    assert isinstance(refused, int)
    return slowed_ms, refused


class Progress:
    """Counts messages as they come, and checks that they come at a rate of *per_s*, and a second's worth before."""

    def __init__(self, per_s: float, step: float = 1) -> None:
        self.per_s = per_s
        self.step = step  # the most by which one read, or one delivery, may exceed the rate
        self.began = trio.current_time()
        self.count = 0.0

    @property
    def seconds(self) -> float:
        return trio.current_time() - self.began

    def came(self, count: float = 1) -> None:
        self.count += count
        assert self.count <= self.per_s * (self.seconds + 1) + self.step, f"{self.count} after {self.seconds} s"

    def check_end(self) -> None:
        """Assert that it took as long as the rate demands, and not longer."""
        expected_s = self.count / self.per_s - 1
        assert self.seconds == pytest.approx(expected_s, abs=self.step / self.per_s + 0.3), self.count
