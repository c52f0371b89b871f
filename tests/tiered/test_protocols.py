"""Clients of every protocol read old messages from an object store; the other tests use a directory."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.broker import test_cold_history as history

from .cold import Tier

CHECKS = (
    history.test_a_pull_by_tag_finds_cold_messages,
    history.test_rocketmqs_look_ups_know_the_cold_messages,
    history.test_a_cold_message_is_found_by_key_and_by_id_and_can_be_sent_back,
    history.test_a_pop_consumer_takes_the_whole_history_once,
    history.test_a_durable_subscription_of_stomp_gets_what_came_while_it_was_away,
    history.test_a_session_over_several_queues_gets_them_in_the_order_of_the_log,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
async def test_an_object_store_serves_every_protocol(
    tmp_path: Path, s3_tier: Tier, check: Callable[[Path, Tier | None], Awaitable[None]]
) -> None:
    await check(tmp_path, s3_tier)
