"""A plugin that holds half messages asks a live producer about them, without knowing how producers are spoken to."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import orjson
import pytest
import trio
from tests.remoting.conftest import Harness
from tests.remoting.test_plugin import PATIENCE_S, broker

from martlet.broker import Broker
from martlet.contracts import Producers, RecordView, Service
from martlet.message import Message, Record, decode_properties
from martlet.plugins import loader
from martlet.plugins.hooks import Hooks
from martlet.records.codec import decode_record
from martlet.runtime.installed import EntryPoint
from martlet.runtime.steps import Steps
from martlet.state import Projection
from martlet.state.projection import NOTHING
from martlet_remoting.handlers.producers import RemotingProducers
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode

HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
PROPERTIES = b"PGROUP\x01P\x02UNIQ_KEY\x01U1\x02REAL_TOPIC\x01T\x02REAL_QID\x013\x02TRAN_MSG\x01true\x02"
CHECK = RequestCode.CHECK_TRANSACTION_STATE


def heartbeat(client_id: str, *groups: str) -> bytes:
    producers = [{"groupName": group} for group in groups]
    return orjson.dumps({"clientID": client_id, "consumerDataSet": [], "producerDataSet": producers})


async def half_of(made: Broker) -> Record:
    """A half message, as a plugin for transactions would have stored it; the second of its queue."""
    made.topics.ensure(HALF, 1)
    made.publish(Message(HALF, b"another", b"", 0))
    host = bytes((10, 0, 0, 1)) + (4000).to_bytes(4, "big")
    placed = made.publish(Message(HALF, b"body", PROPERTIES, 0, 7, 0, 1_700_000_000_123, host))
    made.store.committer.commit()
    await made.store.flusher.wait_flushed(placed.end)
    data = made.store.lookup.record_at(placed.position)
    assert data is not None
    return decode_record(data, 0, placed.position)


async def test_a_live_producer_is_asked_with_what_it_sent(harness: Harness) -> None:
    producers = RemotingProducers(lambda: harness.state)
    half = await half_of(harness.broker)
    client, other = harness.client(), harness.client()
    await client.ask(RequestCode.HEART_BEAT, body=heartbeat("c", "P"))
    await other.ask(RequestCode.HEART_BEAT, body=heartbeat("d", "Q"))
    assert producers.check_transaction("P", half, "T", 3)
    await harness.step()
    (asked,) = client.requests
    assert (asked.code, asked.flag & FLAG_ONEWAY, other.requests) == (CHECK, FLAG_ONEWAY, [])
    assert dict(asked.ext) == {
        "topic": "T",
        "commitLogOffset": str(half.position),
        "tranStateTableOffset": "1",
        "msgId": "U1",
        "transactionId": "U1",
        "offsetMsgId": harness.state.templates.message_id(half.position),
        "bname": harness.broker.config.name,
    }
    sent = decode_record(asked.body, 0, half.position)
    assert (sent.topic, sent.queue_id, sent.body, sent.flag) == ("T", 3, b"body", 7)
    assert (sent.queue_offset, sent.position) == (1, half.position)
    assert (sent.born_ms, sent.born_host) == (half.born_ms, half.born_host)
    assert (sent.store_ms, sent.store_host) == (half.store_ms, half.store_host)
    assert decode_properties(sent.properties) == decode_properties(half.properties)


async def test_the_live_producers_of_a_group_are_asked_in_turn(harness: Harness) -> None:
    producers = RemotingProducers(lambda: harness.state)
    half = await half_of(harness.broker)
    clients = [harness.client() for _ in range(3)]
    for number, client in enumerate(clients):
        await client.ask(RequestCode.HEART_BEAT, body=heartbeat(f"c{number}", "P"))
    for _ in range(6):
        assert producers.check_transaction("P", half, "T", 0)
    await harness.step()
    assert [len(client.requests) for client in clients] == [2, 2, 2]
    await clients[0].ask(RequestCode.UNREGISTER_CLIENT, {"clientID": "c0", "producerGroup": "P"})
    clients[1].close()
    for _ in range(4):
        assert producers.check_transaction("P", half, "T", 0)
    await harness.step()
    assert [len(client.requests) for client in clients] == [2, 2, 6]
    clients[2].close()
    assert not producers.check_transaction("P", half, "T", 0)


async def test_nobody_is_asked_before_the_plugin_serves(harness: Harness) -> None:
    assert not RemotingProducers(lambda: None).check_transaction("P", await half_of(harness.broker), "T", 0)


# in a running broker


class Breakable(RemotingPlugin):
    """Remoting that is stopped by a message in topic ``break``."""

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        return (Breaks(),)


class Breaks:
    name = "breaks"
    topics = frozenset(("break",))

    def apply(self, records: Sequence[RecordView]) -> None:
        raise ValueError("broken")

    def freeze(self) -> Steps[Sequence[bytes]]:
        yield
        return ()

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        yield

    def forget(self, topic: str) -> None: ...

    def floor(self) -> int:
        return NOTHING

    def roll(self, start: int, end: int) -> Steps[None]:
        yield


class Asker(Hooks):
    """A plugin that holds half messages, as far as this test is concerned."""

    brokers: ClassVar[list[Broker]] = []

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        self.brokers.append(broker)
        return ()


async def test_the_capability_goes_with_its_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "remoting": f"{__name__}:Breakable",
        "asker": f"{__name__}:Asker",
        "nameserver": "martlet_remoting.nameserver.plugin:NameServerPlugin",
    }
    entries = {name: EntryPoint(name, value, loader.GROUP) for name, value in values.items()}
    monkeypatch.setattr(loader, "available", lambda: entries)
    monkeypatch.setattr("martlet.app.config.available", lambda: entries)
    monkeypatch.setattr(Asker, "brokers", [])
    async with broker(tmp_path, "asker") as running:
        (made,) = Asker.brokers
        client = await running.connect()
        assert (await client.ask(RequestCode.HEART_BEAT, {}, heartbeat("c", "P"))).code == 0
        half = await half_of(made)
        producers = made.capability(Producers)
        assert producers is not None
        assert producers.check_transaction("P", half, "T", 0)
        assert (await client.receive()).code == CHECK
        made.topics.ensure("break", 1)
        made.publish(Message("break", b"x"))
        made.store.committer.commit()
        with trio.fail_after(PATIENCE_S):
            assert await client.stream.receive_some() == b""  # the plugin's connections were closed
        assert made.capability(Producers) is None
