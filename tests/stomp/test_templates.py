"""Templates of messages are remembered within limits, however clients vary their headers."""

from martlet_stomp.mapping.destinations import Destination
from martlet_stomp.shared.context import TEMPLATES_BYTES_KEPT, TEMPLATES_KEPT, MessageTemplates
from martlet_stomp.wire.packets import MessageHeaders


def anywhere(destination: Destination) -> None:
    """Clients may send to any destination."""


def test_equal_headers_have_one_template() -> None:
    templates, headers = (
        MessageTemplates(frozenset(), "", anywhere),
        MessageHeaders("/queue/a", (("key", "value"),), 100),
    )
    assert templates.find(headers) is templates.find(headers)


def test_templates_are_remembered_within_limits() -> None:
    templates = MessageTemplates(frozenset(), "", anywhere)
    for _ in range(TEMPLATES_KEPT + 10):
        templates.find(MessageHeaders("/queue/a", (), 30))
    assert 0 < len(templates.table) <= TEMPLATES_KEPT
    for _ in range(100):
        templates.find(MessageHeaders("/queue/a", (("key", "v" * 60_000),), 60_000))
        assert 0 < sum(headers.size for headers in templates.table) <= TEMPLATES_BYTES_KEPT
