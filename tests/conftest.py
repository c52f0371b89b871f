"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--target",
        choices=("martlet", "rocketmq"),
        default="martlet",
        help="the broker that the interop tests run against (rocketmq: the real one, which proves the tests right)",
    )
