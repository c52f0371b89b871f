"""A delayed message is held or refused, and never delivered at once, whatever fails in the plugin that holds them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import trio
from tests.remoting.conftest import send_ext
from tests.remoting.test_plugin import PATIENCE_S, SEND, broker
from tests.remoting.test_producers import Breaks

from martlet.broker import Broker
from martlet.contracts import Service, Stage, Timers
from martlet.message import Message
from martlet.plugins import loader
from martlet.plugins.hooks import Hooks
from martlet.runtime.installed import EntryPoint
from martlet.state import Projection
from martlet_remoting.wire.codes import ResponseCode

HELD = "held"
DELAYED = "DELAY\x013\x02"


class Timer(Hooks):
    """Holds delayed messages in a topic; a message in topic ``break`` fails its projection, ``fail`` its service."""

    made: ClassVar[list["Timer"]] = []

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.fail = trio.Event()
        self.service_ended = trio.Event()
        self.brokers: list[Broker] = []
        self.made.append(self)

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        self.brokers.append(broker)
        return {Timers: Timers()}

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        def hold(message: Message) -> Message:
            if b"DELAY\x01" in message.properties:
                message.topic, message.queue_id = HELD, 0
            return message

        return (Stage(hold, properties=("DELAY",)),)

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        return (Breaks(),)

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        async def deliver() -> None:
            try:
                await self.fail.wait()
                raise ValueError("broken")
            finally:
                self.service_ended.set()

        return (deliver,)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"remoting": "martlet_remoting.plugin:RemotingPlugin", "timer": f"{__name__}:Timer"}
    values["nameserver"] = "martlet_remoting.nameserver.plugin:NameServerPlugin"
    entries = {name: EntryPoint(name, value, loader.GROUP) for name, value in values.items()}
    monkeypatch.setattr(loader, "available", lambda: entries)
    monkeypatch.setattr("martlet.app.config.available", lambda: entries)
    monkeypatch.setattr(Timer, "made", [])


def stored(made: Broker, topic: str) -> int:
    """How many messages were stored in *topic*."""
    return sum(queue.next_offset for queue in made.store.queues.topics.get(topic, {}).values())


@pytest.mark.usefixtures("installed")
async def test_a_delayed_message_is_refused_once_the_plugin_that_holds_them_was_stopped(tmp_path: Path) -> None:
    async with broker(tmp_path, "timer") as running:
        (timer,) = Timer.made
        (made,) = timer.brokers
        made.topics.ensure(HELD, 1)
        made.topics.ensure("break", 1)
        client = await running.connect()
        assert (await client.ask(SEND, send_ext("T", 0, DELAYED), b"first")).code == 0
        assert (stored(made, HELD), stored(made, "T")) == (1, 0)
        made.publish(Message("break", b"x"))
        made.store.committer.commit()
        with trio.fail_after(PATIENCE_S):
            await timer.service_ended.wait()
        answer = await client.ask(SEND, send_ext("T", 0, DELAYED), b"second")
        assert answer.code == ResponseCode.MESSAGE_ILLEGAL
        assert answer.remark == (
            "message has the property DELAY, and this broker does not support delayed messages; "
            "add the plugin timer to plugins.enabled"
        )
        assert (stored(made, HELD), stored(made, "T")) == (1, 0)
        assert (await client.ask(SEND, send_ext("T"), b"third")).code == 0
        assert stored(made, "T") == 1


@pytest.mark.usefixtures("installed")
async def test_delayed_messages_are_held_while_a_failed_service_restarts(tmp_path: Path) -> None:
    async with broker(tmp_path, "timer") as running:
        (timer,) = Timer.made
        (made,) = timer.brokers
        made.topics.ensure(HELD, 1)
        client = await running.connect()
        assert (await client.ask(SEND, send_ext("T", 0, DELAYED), b"first")).code == 0
        timer.fail.set()
        with trio.fail_after(PATIENCE_S):
            await timer.service_ended.wait()
        assert (await client.ask(SEND, send_ext("T", 0, DELAYED), b"second")).code == 0
        assert (stored(made, HELD), stored(made, "T")) == (2, 0)
