"""Options and fixtures of the whole suite."""

import pytest

from martlet.store.files import RealDisk


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--target",
        choices=("martlet", "rocketmq"),
        default="martlet",
        help="the broker that the interop tests run against (rocketmq: the real one, which proves the tests right)",
    )


@pytest.fixture
def nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read from the disk has to be waited for."""
    monkeypatch.setattr(RealDisk, "read_now", lambda *_: None)
