"""Every hook does in a running broker what `docs/hooks.md` says, and the page names a plugin that uses it."""

import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import cast

import pytest
import trio
from tests.net.test_server_sockets import receive_exactly
from tests.plugins.plugin_toys import Full, Greeting, Late, installed, threads

from martlet.app.config import Config, PluginsConfig
from martlet.app.hooks import HOOKS_OF_A_BROKER
from martlet.app.startup import run
from martlet.broker import Broker
from martlet.cli import main as cli
from martlet.contracts import Challenge, Identity, LoginOrigin, Password, Proved, RecordView
from martlet.errors import ConfigError, PluginError, Reason, Refused, StoreError
from martlet.message import Message
from martlet.net.addresses import split_address
from martlet.plugins.hooks import HOOKS, Hooks
from martlet.plugins.loader import load
from martlet.records.codec import decode_record
from martlet.records.layout import ENTRY
from martlet.settings import BrokerConfig
from martlet.testing.cold import MemoryTier, remove_sealed
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import drain, small_config

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Full.said.clear()
    Full.tier = None
    with installed(monkeypatch):
        yield


class Running:
    """A broker that runs with the plugins of a test."""

    def __init__(self, broker: Broker, addresses: dict[str, str], stop: trio.Event) -> None:
        self.broker = broker
        self.addresses = addresses
        self.stop = stop

    def stored(self, body: bytes, topic: str = "t") -> bytes:
        """Publish a message and return its record."""
        self.broker.topics.ensure(topic, 1)
        placed = self.broker.publish(Message(topic, body))
        self.broker.store.committer.commit()
        record = self.broker.store.lookup.record_at(placed.position)
        assert record is not None
        return record


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, *enabled: str, disk: FakeDisk | None = None, required: Sequence[str] = ()
) -> AsyncIterator[Running]:
    disk = disk or FakeDisk()
    brokers: list[Broker] = []
    made = Broker.__init__

    def remember(self: Broker, *arguments: object, **options: object) -> None:
        made(self, *arguments, **options)  # type: ignore[arg-type]
        brokers.append(self)

    monkeypatch.setattr(Broker, "__init__", remember)
    config = Config(
        broker=BrokerConfig(data="/data"),
        store=small_config(flush="async"),
        plugins=PluginsConfig(list(enabled), list(required)),
    )
    addresses: dict[str, str] = {}
    ready, stop = trio.Event(), trio.Event()

    def is_ready(bound: dict[str, str]) -> None:
        addresses.update(bound)
        ready.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: run(config, ready=is_ready, disk=disk, stop=stop))
        await ready.wait()
        yield Running(brokers[0], addresses, stop)
        stop.set()


async def test_martlet_protocols_opens_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running(monkeypatch, "full") as made,
        await trio.open_tcp_stream(*split_address(made.addresses["toy"])) as stream,
    ):
        await stream.send_all(b"echo hello\n")
        assert await receive_exactly(stream, 6) == b"hello\n"


async def test_martlet_stages_see_every_message_in_the_order_of_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full", "late") as made:
        record = decode_record(made.stored(b"x"))
        assert record.properties == b"COLOUR\x01red\x02LATE\x01COLOUR\x01red\x02"


def bodies(broker: Broker, topic: str) -> list[bytes]:
    """The bodies in queue 0 of *topic*."""
    return drain(broker.store, broker.store.queue(topic, 0))


async def test_martlet_routers_name_further_queues_that_index_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk()
    async with running(monkeypatch, "full", "late", disk=disk) as made:
        record = decode_record(made.stored(b"a b", "routed"))
        assert record.properties.startswith(b"COLOUR\x01red\x02LATE\x01COLOUR\x01red\x02"), "stages come first"
        made.stored(b"b a b", "routed")
        made.stored(b"a", "t")
        assert (bodies(made.broker, "%LMQ%a"), bodies(made.broker, "%LMQ%b")) == ([b"a b", b"b a b"],) * 2
        with pytest.raises(Refused, match="plugin 'full' failed in its router; KeyError: b'c'"):
            made.stored(b"a c", "routed")
        with pytest.raises(Refused, match="'bad' in INNER_MULTI_DISPATCH is no light topic"):
            made.stored(b"bad", "routed")
        named = Message("t", b"x", b"INNER_MULTI_DISPATCH\x01%LMQ%a\x02", queue_id=0)
        placed = made.broker.publish(named)
        made.broker.store.committer.commit()
        data = made.broker.store.lookup.record_at(placed.position)
        assert data is not None
        assert decode_record(data).property("INNER_MULTI_DISPATCH") == "", "what no router says does not count"
    for path in [path for path in disk.files if "/consumequeue/" in path]:
        disk.unlink(path)
    async with running(monkeypatch, "late", disk=disk) as made:
        assert (bodies(made.broker, "%LMQ%a"), bodies(made.broker, "%LMQ%b")) == ([b"a b", b"b a b"],) * 2
        topic = made.broker.topics.get("%LMQ%a")
        assert topic is not None
        assert made.broker.topics.get("%LMQ%c") is None


async def test_martlet_filters_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full") as made:
        compiler = made.broker.filter_compiler("LONGER")
        assert compiler is not None
        predicate = compiler("3")
        assert [predicate(RecordView(made.stored(body))) for body in (b"abc", b"abcd")] == [False, True]
        with pytest.raises(Refused) as caught:
            compiler("x")
        assert caught.value.reason is Reason.ILLEGAL
        with pytest.raises(Refused, match="plugin 'full' failed in its filter LONGER; AttributeError"):
            predicate(cast(RecordView, None))
        assert made.broker.filter_compiler("SHORTER") is None


async def test_martlet_authenticators_say_who_a_client_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full") as made:
        asked = made.broker.authentication
        assert await asked.authenticate_password(Password("ada", b"lovelace"), LoginOrigin()) == Identity("ada")
        with pytest.raises(Refused, match="plugin 'full' failed in its authenticator; KeyError: 'bob'") as caught:
            await asked.authenticate_password(Password("bob", b"?"), LoginOrigin())
        assert caught.value.reason is Reason.UNAVAILABLE


async def test_martlet_mechanisms_identify_a_client_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full") as made:
        asked = made.broker.authentication
        exchange, other = asked.begin("TWO-STEPS"), asked.begin("TWO-STEPS")
        assert await asked.proceed(exchange, b"hello", LoginOrigin()) == Challenge(b"who, hello")
        assert await asked.proceed(other, b"a", LoginOrigin()) == Challenge(b"who, a"), (
            "each client has an exchange of its own"
        )
        assert await asked.proceed(exchange, b"ada", LoginOrigin()) == Proved(Identity("ada"), b"welcome")
        assert threads.pop() is not threading.current_thread(), "a step may be slow"
        with pytest.raises(Refused, match="wrong"):
            await asked.proceed(other, b"wrong", LoginOrigin())
        with pytest.raises(Refused, match="mechanism 'THREE' is unknown; offered: TWO-STEPS") as unknown:
            asked.begin("THREE")
        assert unknown.value.reason is Reason.NOT_SUPPORTED
        assert asked.refused == 2


@pytest.mark.parametrize(
    ("data", "what"), [(b"\xff", "UnicodeDecodeError"), (b"nothing", "TypeError: it returned None")]
)
async def test_a_mechanism_that_fails_proves_nothing(monkeypatch: pytest.MonkeyPatch, data: bytes, what: str) -> None:
    async with running(monkeypatch, "full") as made:
        asked = made.broker.authentication
        exchange = asked.begin("TWO-STEPS")
        await asked.proceed(exchange, b"", LoginOrigin())
        with pytest.raises(Refused, match=f"plugin 'full' failed in its mechanism TWO-STEPS; {what}") as caught:
            await asked.proceed(exchange, data, LoginOrigin())
        assert caught.value.reason is Reason.UNAVAILABLE


async def test_an_authorizer_that_fails_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full") as made:
        with pytest.raises(Refused, match="plugin 'full' failed in its authorizer; ZeroDivisionError"):
            made.broker.gate(Identity("ada")).publish(Message("zero", b"x"))


async def test_martlet_authorizers_give_the_first_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full") as made:
        assert not made.broker.gate(Identity("ada")).allows("subscribe", "secret")
        # Nobody has an opinion.
        assert not made.broker.gate(Identity("ada")).allows("subscribe", "t")
    async with running(monkeypatch, "full", "guard") as made:
        assert not made.broker.gate(Identity("ada")).allows("subscribe", "t")


async def test_martlet_quotas_limit_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full", "guard") as made:
        gate, first, second = made.broker.gate, RecordingPeer(), RecordingPeer()
        gate(Identity("ada"), peer=first)
        with pytest.raises(Refused, match="user 'ada': 1 connections are open, and the quota is 1") as caught:
            gate(Identity("ada"), peer=second)
        assert caught.value.reason is Reason.QUOTA
        gate(Identity("bob"), peer=second)
        [ended] = first.paced.tells
        ended()
        gate(Identity("ada"), peer=second)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("zero", "ZeroDivisionError"),
        ("wrong", "TypeError: it returned .None,.; return quotas"),
        ("twice", "ValueError: it returned two quotas of one group, or of 'twice'"),
    ],
)
async def test_quotas_that_fail_refuse_the_client(monkeypatch: pytest.MonkeyPatch, name: str, what: str) -> None:
    async with running(monkeypatch, "full") as made:
        with pytest.raises(Refused, match=f"plugin 'full' failed in its quotas; {what}"):
            made.broker.gate(Identity(name), peer=RecordingPeer())


async def test_martlet_capabilities_are_asked_for_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full") as made:
        greeting = made.broker.capability(Greeting)
        assert greeting is not None
        assert greeting.text == "hello"
        assert made.broker.capability(FakeDisk) is None


async def test_martlet_projections_are_replayed_before_the_ports_open(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk()
    async with running(monkeypatch, "full", disk=disk) as made:
        made.stored(b"one")
        made.stored(b"two")
        assert Full.bodies.seen == [b"one", b"two"]
    disk.unlink("/data/config/bodies.snapshot")
    async with running(monkeypatch, "full", disk=disk) as made:
        assert Full.bodies.seen == [b"one", b"two"]
        made.stored(b"three")
    async with running(monkeypatch, "full", disk=disk) as made:
        assert Full.bodies.seen == [b"one", b"two", b"three"]


async def test_martlet_projections_that_fail_stop_their_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(monkeypatch, "stateful", "late") as made:
        stream = await trio.open_tcp_stream(*split_address(made.addresses["toy"]))
        await stream.send_all(b"echo hello\n")
        assert await receive_exactly(stream, 6) == b"hello\n"
        made.stored(b"bad")
        assert await stream.receive_some() == b""
        await stream.aclose()
        with pytest.raises(OSError, match="connect"):
            await trio.open_tcp_stream(*split_address(made.addresses["toy"]))
        assert made.broker.capability(Greeting) is None
        assert Full.said == ["served"]
        assert decode_record(made.stored(b"x")).body == b"x"
    text = r"plugin 'stateful' failed in a projection; ValueError: a bad body \(.*plugin_toys\.py:\d+\); "
    assert re.search(f"{text}the plugin is removed", caplog.text)


@pytest.mark.parametrize("when", ["record", "deletion"])
async def test_all_projections_of_a_plugin_stop_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    async with running(monkeypatch, "two_states", "late") as made:
        made.stored(b"good")
        if when == "record":
            made.stored(b"bad")
        else:
            made.broker.store.deletions.delete_topic("t")
        found = made.broker.projections.statistics()
        assert [found[name]["failed"] for name in ("bodies", "counted")] == [True, True]  # type: ignore[index]
        assert decode_record(made.stored(b"x")).body == b"x"
    assert caplog.text.count("plugin 'two_states' failed in a projection") == 1


async def test_a_broker_stops_whose_own_state_cannot_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        async with running(monkeypatch, "late") as made:
            made.broker.sessions.journal.note(b"no note about a session")
            made.broker.store.committer.commit()
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await fail()
    assert caught.group_contains(StoreError, match="the broker's own state cannot be computed from the log")


@pytest.mark.parametrize("when", ["while it runs", "at the start"])
async def test_martlet_projections_that_fail_in_a_required_plugin_stop_the_broker(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    disk = FakeDisk()
    if when == "at the start":
        async with running(monkeypatch, "stateful", disk=disk) as made:
            made.stored(b"bad")

    async def fail() -> None:
        async with running(monkeypatch, "stateful", disk=disk, required=["stateful"]) as made:
            made.stored(b"bad")
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await fail()
    assert caught.group_contains(PluginError, match="plugins.required names it")


async def test_martlet_cold_tiers_keep_what_retention_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk()
    async with running(monkeypatch, "full", disk=disk) as made:
        for number in range(100):
            made.stored(b"%03d" % number * 20)
        tier = Full.tier
        assert tier is not None
        tier.is_down = True
        await remove_sealed(made.broker.store)
        assert made.broker.store.first_position == 0, "nothing leaves before the tier has a copy"
        tier.is_down = False
        await remove_sealed(made.broker.store)
        queue = made.broker.store.queue("t", 0)
        assert queue.first_offset == 0 < queue.local_from
    async with running(monkeypatch, "full", disk=disk) as made:
        queue = made.broker.store.queue("t", 0)
        assert queue.first_offset == 0 < queue.local_from, "it says before the ports open what it has"
        result = await made.broker.store.readers.read_far(queue, 0, 1, 1)
        assert decode_record(b"".join(result.pieces)).body == b"000" * 20


async def test_martlet_cold_tiers_of_two_plugins_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Late, "martlet_cold_tiers", lambda self, broker: [MemoryTier(broker.store)], raising=False)

    async def fail() -> None:
        async with running(monkeypatch, "full", "late"):
            pass

    with pytest.raises(ExceptionGroup) as caught:
        await fail()
    text = "plugins 'full' and 'late' each have a cold tier, and a broker has one; enable only one of them"
    assert caught.group_contains(ConfigError, match=text)


async def test_martlet_cold_tiers_that_cannot_begin_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(self: MemoryTier) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(MemoryTier, "begin", begin)

    async def fail() -> None:
        async with running(monkeypatch, "full"):
            pass

    with pytest.raises(ExceptionGroup) as caught:
        await fail()
    assert caught.group_contains(
        PluginError, match="plugin 'full' cannot begin its cold tier; OSError: no route to host"
    )


def codes(broker: Broker, topic: str) -> list[int]:
    """The codes of the entries of queue 0."""
    queue = broker.store.queue(topic, 0)
    return [code for _, _, code in ENTRY.iter_unpack(broker.store.queues.entries(queue, 0, 100))]


async def test_martlet_dispatchers_supply_the_codes_of_entries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    async with running(monkeypatch, "full", disk=disk) as made:
        made.broker.set_stages(())
        for topic in ("lengths", "broken", "t"):
            made.broker.topics.ensure(topic, 1)
            for properties in (b"TAGS\x01a\x02", b"x\x01yy\x02"):
                made.broker.publish(Message(topic, b"x", properties, queue_id=0))
        made.broker.store.committer.commit()
        assert codes(made.broker, "lengths") == [7, 5]
        assert codes(made.broker, "t") == codes(made.broker, "broken") == [ord("a"), 0]
        assert caplog.text.count("plugin 'full' failed to dispatch messages of topic broken") == 1
    for path in [path for path in disk.files if "/consumequeue/" in path]:
        disk.unlink(path)
    async with running(monkeypatch, "full", disk=disk) as made:
        assert codes(made.broker, "lengths") == [7, 5], "a rebuild asks again"


async def test_martlet_dispatchers_of_two_plugins_for_one_topic_end_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Late, "martlet_dispatchers", lambda self: {"lengths": lambda properties, store_ms: 0}, raising=False
    )

    async def fail() -> None:
        async with running(monkeypatch, "full", "late"):
            pass

    with pytest.raises(ExceptionGroup) as caught:
        await fail()
    assert caught.group_contains(PluginError, match="plugin 'late' cannot dispatch topic 'lengths'")


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook not in ("martlet_reload", "martlet_stopping")])
@pytest.mark.parametrize("result", [None, "text", 42, [42], [None]])
async def test_a_hook_that_returns_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, hook: str, result: object
) -> None:
    monkeypatch.setattr(Late, hook, lambda self: result, raising=False)
    with installed(monkeypatch), pytest.raises(PluginError) as caught:
        await load(["late"], {}).call(hook, broker=None)
    text = str(caught.value)
    assert text.startswith(f"plugin 'late' failed in {hook}; it returned ")
    assert "; return a " in text


async def test_martlet_services_run_while_the_broker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full"):
        while "serving" not in Full.said:
            await trio.lowlevel.checkpoint()
    assert Full.said.count("serving") == 1


def test_martlet_commands_are_subcommands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["toy", "--loud"]) == 7
    assert Full.said == ["LOUD"]
    cli.main(["--help"])
    said = capsys.readouterr()
    assert "says something" in said.out
    # A plugin without commands is not created for them: the command line does not have its configuration.
    assert "needs_file" not in said.err


async def test_martlet_reload_is_called_at_sighup(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full") as made:
        rules, authentication = made.broker.rules, made.broker.authentication
        before = rules.generation, authentication.generation
        signal.raise_signal(signal.SIGHUP)
        assert "reloaded" not in Full.said
        while (rules.generation, authentication.generation) != (before[0] + 1, before[1] + 1):
            await trio.lowlevel.checkpoint()
        assert "reloaded" in Full.said, "caches are dropped after the plugins have reloaded"
    assert Full.said.count("reloaded") == 1


async def test_martlet_stopping_is_called_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(monkeypatch, "full"):
        assert "stopping" not in Full.said
    assert Full.said[-1] == "stopping"


# the page


def sections() -> dict[str, str]:
    """The text below each heading of the page."""
    parts = re.split(r"^## `(martlet_\w+)`.*$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_has_a_heading_for_every_hook_in_their_order() -> None:
    assert tuple(sections()) == HOOKS


def test_the_page_names_the_hooks_in_the_order_of_their_calls() -> None:
    order = re.search(r"^The order is: [^.]*\.", PAGE.read_text(), re.MULTILINE)
    assert order is not None
    assert re.findall(r"martlet_\w+", order[0]) == ["martlet_dispatchers", *HOOKS_OF_A_BROKER]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_used_by_the_plugin_that_the_page_names(hook: str) -> None:
    named = re.search(r"Used by `([\w.]+):(\w+)`", sections()[hook])
    assert named is not None
    plugin = getattr(import_module(named[1]), named[2])
    assert issubclass(plugin, Hooks)
    assert getattr(plugin, hook) is not getattr(Hooks, hook)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_test_that_names_it(hook: str) -> None:
    assert [name for name in globals() if name.startswith(f"test_{hook}_")]
