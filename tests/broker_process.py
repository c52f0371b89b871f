"""Brokers in processes of their own, started as a user does it.

``python -m tests.broker_process HOURS ...`` is the command ``martlet`` with a clock that is some hours ahead.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import asdict
from tests.kills import Victim

from martlet.cli.main import main
from martlet.runtime.clock import SystemClock
from martlet.store import StoreConfig
from martlet.testing.stores import small_config

__all__ = ["BrokerProcess", "broker_process", "small_store"]

PROTOCOLS = ("remoting", "nameserver", "mqtt", "stomp")


class BrokerProcess(Victim):
    """A broker with its store in *data*, whose clock is *hours* ahead; ``addresses`` are those of its ready line."""

    def __init__(
        self,
        data: Path,
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        hours: int = 0,
    ) -> None:
        ports = {f"{name}.listen": "127.0.0.1:0" for name in PROTOCOLS}
        sets = [f"{name}={value}" for name, value in {**ports, **(settings or {})}.items()]
        words = ["run", "--data", data, *(word for each in sets for word in ("--set", each))]
        before = ("tests.broker_process", hours) if hours else ("martlet",)
        super().__init__(*before, *words, environment=environment)
        self.addresses = dict(word.split("=", 1) for word in self.line().split() if "=" in word)


def small_store(**changes: object) -> dict[str, object]:
    """Return the settings of a store whose files are small, with *changes*."""
    small = asdict(small_config(segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20, **changes))
    usual = asdict(StoreConfig())
    return {f"store.{name}": value for name, value in small.items() if value != usual[name]}


@contextmanager
def broker_process(
    data: Path, settings: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a broker with its store in *data*, and yield the address of its name server."""
    with BrokerProcess(data, {"store.flush": "async", **(settings or {})}, environment) as process:
        try:
            yield process.addresses["nameserver"]
        finally:
            process.stop()


if __name__ == "__main__":
    ahead_ms = int(sys.argv[1]) * 3_600_000
    now_ms = SystemClock.now_ms
    SystemClock.now_ms = lambda self: now_ms(self) + ahead_ms  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2:]))
