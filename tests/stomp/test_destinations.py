"""Destinations: what clients may write, and what is written for a queue, such as where a dead letter comes from."""

import pytest

from martlet_stomp.mapping.destinations import destination_of, parse_destination
from martlet_stomp.wire.errors import StompError


@pytest.mark.parametrize(
    "text", ["/queue/orders", "/queue/orders.new", "/queue/größe 1", "/queue/50%", "/queue/%DLQ%group"]
)
def test_a_queue_has_the_destination_to_which_a_client_sent(text: str) -> None:
    assert destination_of(parse_destination(text).topic) == text


@pytest.mark.parametrize(
    "topic", ["a%2Fb", "mqtt%2Fdoor", "a%41", "a%2541", "a%FF", "a%0A", "a%2e", "a%", "a%7F", "a%3Fconsumer%2Ex"]
)
def test_other_topics_are_written_as_they_are(topic: str) -> None:
    """Without their escapes they would be those of another queue, of a name, or of none."""
    text = destination_of(topic)
    assert text == f"/queue/{topic}"
    assert parse_destination(text, ["mqtt"]).topic == topic


@pytest.mark.parametrize(
    "text",
    [
        "/topic/a,/temp-queue/b",
        "queue://a",
        "topic://a",
        "/queue/a,topic://b",
        "/queue/a?consumer.exclusive=true",
    ],
)
def test_prefixes_and_options_of_activemq_are_an_error(text: str) -> None:
    """They would be a queue of exactly that name, in which nobody looks for messages."""
    with pytest.raises(StompError, match="prefix or options that are not supported"):
        parse_destination(text)


@pytest.mark.parametrize("text", ["/queue/a,b", "/queue/why?", "/queue/a/queue/b", "/queue/x://a"])
def test_commas_and_question_marks_are_characters_of_a_name(text: str) -> None:
    assert parse_destination(text).topic
