"""A client with much to do leaves others their turn."""

from pathlib import Path

import trio
import trio.testing
from tests.wire_clients.stomp import StompBroker, stomp_broker

from martlet.testing.peers import RecordingPeer
from martlet_filter_sql92.plugin import Sql92Config, Sql92Plugin
from martlet_stomp.handler import HEADS_A_TURN, MESSAGES_A_TURN, SUBSCRIPTIONS_A_TURN
from martlet_stomp.wire.packets import SendRun


async def test_others_have_their_turn_after_many_messages_with_new_headers(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        connection = stomp.protocol.connect(0.0)
        handler = stomp.protocol.handle(RecordingPeer(), connection)

        async def handle(data: bytes) -> list[bool]:
            """Return for each run in *data* whether others have a turn after it."""
            connection.receive_data(data, 0.0)
            found = []
            for event in connection.events():
                rest = handler.handle(event)
                if isinstance(event, SendRun):
                    found.append(rest is not None)
                if rest is not None:
                    await rest
            return found

        await handle(b"CONNECT\naccept-version:1.2\n\n\0")
        frame = b"SEND\ndestination:/queue/a\nid:%d\n\nx\0"
        assert await handle(b"".join(frame % each for each in range(HEADS_A_TURN + 1))) == [True]
        assert await handle(b"".join(frame % each for each in range(HEADS_A_TURN))) == [False]
        assert await handle(b"".join(frame % (each % 10) for each in range(500))) == [False]
        assert all(await handle(b"".join(frame % each for each in range(1000, 2024))))
        # Messages that are alike, and a few with very long headers, take their time, too.
        assert all(await handle(frame % 1 * (2 * MESSAGES_A_TURN)))
        headers = b"".join(b"h%d:v\n" % each for each in range(95))
        long = b"SEND\ndestination:/queue/a\n%bid:%d\n\nx\0"
        found = await handle(b"".join(long % (headers, each) for each in range(256)))
        assert len(found) > 4
        assert any(found)
        stomp.broker.store.committer.commit()
        await trio.testing.wait_all_tasks_blocked()
        assert len(stomp.records("a")) == 2 * HEADS_A_TURN + 1 + 500 + 1024 + 2 * MESSAGES_A_TURN + 256


class AcksATurn(trio.abc.Instrument):
    """How many acknowledgements were taken, in all and at most between two switches of tasks."""

    def __init__(self, stomp: StompBroker) -> None:
        self._counters = stomp.context.counters
        self._before = self._counters.acknowledged
        self.all = self.most = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        taken = self._counters.acknowledged - self._before
        self._before += taken
        self.all += taken
        self.most = max(self.most, taken)


async def test_others_have_their_turn_after_many_acknowledgements(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, sender = await stomp.connect(), await stomp.connect()
        await talk.subscribe("/queue/a", "client-individual", **{"prefetch-count": "10000"})
        await sender.send(*[sender.frame("SEND", b"x", destination="/queue/a")] * 3000)
        acks = b"".join(talk.settling("ACK", each) for each in reversed(await talk.messages(3000)))
        turns = AcksATurn(stomp)
        trio.lowlevel.add_instrument(turns)
        await talk.send(acks)
        await stomp.idle()
        trio.lowlevel.remove_instrument(turns)
        assert turns.all == 3000
        assert turns.most < MESSAGES_A_TURN


async def test_others_have_their_turn_after_each_selector_and_after_many_subscriptions(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.filters = dict(Sql92Plugin(Sql92Config()).martlet_filters(stomp.broker))
        connection = stomp.protocol.connect(0.0)
        handler = stomp.protocol.handle(RecordingPeer(), connection)

        async def turns(data: bytes) -> list[bool]:
            connection.receive_data(data, 0.0)
            found = []
            for event in connection.events():
                rest = handler.handle(event)
                found.append(rest is not None)
                if rest is not None:
                    await rest
            return found

        await turns(b"CONNECT\naccept-version:1.2\n\n\0")
        selective = b"SUBSCRIBE\ndestination:/topic/a\nid:s%d\nselector:a = %d\n\n\0"
        assert await turns(b"".join(selective % (each, each) for each in range(3))) == [True] * 3
        plain = b"SUBSCRIBE\ndestination:/topic/a\nid:%d\n\n\0"
        found = await turns(b"".join(plain % each for each in range(2 * SUBSCRIPTIONS_A_TURN)))
        assert found.count(True) == 2
