"""Entries of the schedule topic say when a message is due, as RocketMQ reads it."""

import pytest

from martlet.store.codec import tags_code
from martlet_remoting.config import RemotingConfig
from martlet_remoting.plugin import RemotingPlugin


@pytest.mark.parametrize(
    ("properties", "code"),
    [
        (b"DELAY\x011\x02", 10_000 + 1000),
        (b"TAGS\x01a\x02DELAY\x013\x02", 10_000 + 10_000),
        (b"DELAY\x0118", 10_000 + 7_200_000),
        (b"DELAY\x0199\x02", 10_000 + 7_200_000),
        (b"DELAY\x010\x02TAGS\x01a\x02", tags_code(b"a")),
        (b"DELAY\x01-1\x02TAGS\x01a\x02", tags_code(b"a")),
        (b"DELAY\x019999999999\x02", 0),
        (b"", 0),
    ],
)
def test_the_code_is_the_time_at_which_the_message_is_due(properties: bytes, code: int) -> None:
    dispatch = RemotingPlugin(RemotingConfig()).martlet_dispatchers()["SCHEDULE_TOPIC_XXXX"]
    assert dispatch(properties, 10_000) == code
