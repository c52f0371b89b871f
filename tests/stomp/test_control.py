"""Administrators ask for connections and subscriptions."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.wire_clients.stomp import StompClient, stomp_broker

from martlet.contracts import Identity
from martlet_stomp.admin.control import ROWS_A_MESSAGE
from martlet_stomp.wire.packets import Version


async def ask(talk: StompClient, what: str) -> list[dict[str, Any]]:
    """Return the rows of the answer."""
    await talk.send(talk.frame("SUBSCRIBE", id="c", destination=f"/control/{what}", receipt="r"))
    rows = list[dict[str, Any]]()
    while True:
        (message,) = await talk.messages(1)
        assert message["subscription"] == "c"
        if message.headers.get("browser") == "end":
            await talk.receipt("r")
            return rows
        assert message["content-type"] == "application/json"
        some = json.loads(message.body)
        assert 0 < len(some) <= ROWS_A_MESSAGE
        rows += some


@pytest.mark.parametrize("version", Version)
async def test_every_connection_and_subscription_has_a_row(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, other = await stomp.connect(version), await stomp.connect(client_id="ann")
        await other.subscribe("/queue/a", "client-individual", prefetch_count="3", selector="")
        await other.subscribe("/topic/b", name="1", **{"activemq.subscriptionName": "news"})
        await other.publish("/queue/a", b"1", b"2")
        held = await other.messages(2)
        rows = {row["client_id"]: row for row in await ask(talk, "connections")}
        assert rows["ann"].items() >= {"version": "1.2", "subscriptions": 2, "transactions": 0}.items()
        assert rows[None]["version"] == version.text
        first, second = await ask(talk, "subscriptions")
        assert first.items() >= {"id": "0", "destination": "/queue/a", "held": 2, "prefetch": 3}.items()
        assert second.items() >= {"id": "1", "ack": "auto", "held": None, "durable": "topic//ann/news"}.items()
        await other.ack(held[0])
        assert [row["held"] for row in await ask(talk, "subscriptions")] == [1, None]


async def test_many_rows_come_in_several_messages(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        count = 2 * ROWS_A_MESSAGE - 100
        for number in range(count):
            await talk.send(talk.frame("SUBSCRIBE", id=str(number), destination="/topic/a"))
        assert [row["id"] for row in await ask(talk, "subscriptions")] == [str(number) for number in range(count)]


async def test_an_unknown_list_is_an_error(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.send(talk.frame("SUBSCRIBE", id="c", destination="/control/nothing", receipt="r"))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert "/control/connections, /control/subscriptions" in error.body.decode()


async def test_who_may_not_manage_the_broker_sees_nothing(tmp_path: Path) -> None:
    def opinion(identity: Identity, action: str, name: str) -> bool | None:
        return False if action.startswith("manage") else None

    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.authorizers = (opinion,)
        talk = await stomp.connect()
        await talk.send(talk.frame("SUBSCRIBE", id="c", destination="/control/connections", receipt="r"))
        assert (await talk.error())["receipt-id"] == "r"
