"""A client with much to do leaves others their turn."""

from pathlib import Path

import trio.testing
from tests.stomp.stomp_talk import stomp_broker

from martlet.testing.peers import RecordingPeer
from martlet_stomp.handler import HEADS_A_TURN
from martlet_stomp.packets import SendRun


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
        assert await handle(b"".join(frame % (each % 10) for each in range(1000))) == [False]
        assert all(await handle(b"".join(frame % each for each in range(1000, 2024))))
        stomp.broker.store.commit()
        await trio.testing.wait_all_tasks_blocked()
        assert len(stomp.records("a")) == 2 * HEADS_A_TURN + 1 + 1000 + 1024
