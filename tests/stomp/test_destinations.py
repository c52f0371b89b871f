"""The destination that is written for a queue, such as where a dead letter comes from."""

import pytest

from martlet_stomp.destinations import destination_of, parse_destination


@pytest.mark.parametrize(
    "text", ["/queue/orders", "/queue/orders.new", "/queue/größe 1", "/queue/50%", "/queue/%DLQ%group"]
)
def test_a_queue_has_the_destination_to_which_a_client_sent(text: str) -> None:
    assert destination_of(parse_destination(text).topic) == text


@pytest.mark.parametrize("topic", ["a%2Fb", "mqtt%2Fdoor", "a%41", "a%2541", "a%FF", "a%0A", "a%2e", "a%", "a%7F"])
def test_other_topics_are_written_as_they_are(topic: str) -> None:
    """Without their escapes they would be those of another queue, of a name, or of none."""
    text = destination_of(topic)
    assert text == f"/queue/{topic}"
    assert parse_destination(text, ["mqtt"]).topic == topic
