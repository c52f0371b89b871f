"""Which web pages may connect over WebSocket."""

import pytest

from martlet.net.opening.websocket import may_connect

ORIGINS = [
    ("", True),
    ("http://localhost:8080", True),
    ("https://127.0.0.1", True),
    ("http://[::1]:80", True),
    ("https://dashboard.example.org", True),
    ("https://evil.example.org", False),
    ("https://localhost.evil.example.org", False),
    ("http://[", False),
    ("null", False),
]


@pytest.mark.parametrize(("origin", "is_allowed"), ORIGINS)
def test_a_web_page_from_elsewhere_may_not_connect(origin: str, is_allowed: bool) -> None:
    assert may_connect(["https://dashboard.example.org"], origin) is is_allowed


def test_all_web_pages_may_connect_if_the_operator_wants_that() -> None:
    assert may_connect(["*"], "https://evil.example.org")
