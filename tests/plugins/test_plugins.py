"""Plugins: found by name and configured; one that fails ends the start with its name and the reason."""

import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from inspect import Signature
from types import SimpleNamespace
from typing import ClassVar

import orjson
import pytest
import trio
import trio.testing
from tests.plugins.plugin_toys import Full, Hanging, installed
from trio.testing import MockClock

from martlet.app.config import Config, PluginsConfig
from martlet.app.startup import run
from martlet.broker import Broker
from martlet.contracts import Authorizer, Condition, Predicate, RecordView, Service
from martlet.errors import ConfigError, PluginError, Reason, Refused
from martlet.message import Message
from martlet.plugins import loader as plugins
from martlet.plugins.hooks import HOOKS, Hooks
from martlet.plugins.loader import Plugins, _check_addresses, available, guarded_filter, load
from martlet.records.codec import encode_record
from martlet.runtime.installed import EntryPoint
from martlet.settings import BrokerConfig
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import small_config


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Full.said.clear()
    with installed(monkeypatch):
        yield


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What plugins.py logs, whatever another test in this process did to the loggers."""
    logger = logging.getLogger("martlet.plugins")
    monkeypatch.setattr(logger, "disabled", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_the_projects_own_plugins_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert {"remoting", "nameserver"} <= set(available())


def test_plugins_are_loaded_in_the_order_of_the_configuration() -> None:
    assert [plugin.name for plugin in load(["late", "full"], {})] == ["late", "full"]
    assert [plugin.name for plugin in load(["full", "late"], {})] == ["full", "late"]


def test_a_plugin_is_known_by_the_hooks_that_it_overrides() -> None:
    plugins = {plugin.name: plugin for plugin in load(["full", "late"], {})}
    assert set(plugins["full"].hooks) == set(HOOKS)
    assert plugins["late"].hooks == ("martlet_stages",)


def test_ctrl_c_waits_until_a_plugin_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []

    def load_slowly(entry: EntryPoint) -> type[Hooks]:
        signal.raise_signal(signal.SIGINT)
        imported.append(entry.name)
        return Full

    monkeypatch.setattr(EntryPoint, "load", load_slowly)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load(["full"], {})
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert imported == ["full"]


def test_a_plugin_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(
        PluginError, match="plugin 'nope' is not installed; installed: arguments, calling, failing_guard"
    ):
        load(["nope"], {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_plugin", "plugin 'no_plugin' is tests.plugins.plugin_toys:installed, which is not a subclass of"),
        (
            "old_settings",
            "plugin 'old_settings' is tests.plugins.plugin_toys:OldSettings; its config_class <class .*> is not a ",
        ),
        ("misspelled", "plugin 'misspelled' overrides 'martlet_stage', which is no hook; hooks: martlet_protocols, "),
        ("arguments", "plugin 'arguments' does not fit; "),
    ],
)
def test_an_object_that_is_no_plugin_is_refused(name: str, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        load([name], {})


def test_a_plugin_that_cannot_be_imported_ends_the_start() -> None:
    with pytest.raises(PluginError, match="plugin 'gone' cannot be imported; AttributeError"):
        load(["gone", "full"], {})


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin *late* is imported, and *hanging* is made, only when the test is over.

    They are given up once they hang; any other is waited for as long as it takes on a busy machine.
    """
    over = threading.Event()
    hanging: set[threading.Thread] = set()

    class Thread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            assert timeout == plugins.IMPORT_TIMEOUT_S
            while self.is_alive() and self not in hanging:
                super().join(0.01)

    def hang() -> None:
        hanging.add(threading.current_thread())
        over.wait()

    load_entry = EntryPoint.load

    def load_late(entry: EntryPoint) -> object:
        if entry.name == "late":
            hang()
        return load_entry(entry)

    def make(plugin: Hooks, config: object) -> None:
        hang()

    monkeypatch.setattr(EntryPoint, "load", load_late)
    monkeypatch.setattr(Hanging, "__init__", make)
    monkeypatch.setattr(threading, "Thread", Thread)
    yield
    over.set()


@pytest.mark.usefixtures("hung")
@pytest.mark.parametrize("name", ["late", "hanging"])
def test_a_plugin_whose_import_hangs_ends_the_start(name: str) -> None:
    with pytest.raises(PluginError) as caught:
        load([name, "guard"], {})
    assert str(caught.value) == f"plugin {name!r} cannot be imported; TimeoutError: it did not return within 30 s"


def test_a_file_that_is_no_python_is_named_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most plugins have an ``__init__.py``, so the name alone does not tell which file it is."""

    def load_wrong(entry: EntryPoint) -> object:
        return compile("import os\nclass Wrong(:", "/plugins/wrong/__init__.py", "exec")

    monkeypatch.setattr(EntryPoint, "load", load_wrong)
    with pytest.raises(PluginError, match=r"; SyntaxError: invalid syntax \(/plugins/wrong/__init__\.py:2\)$"):
        load(["full"], {})


def test_an_error_inside_a_library_names_the_line_of_the_plugin_that_called_it() -> None:
    with pytest.raises(PluginError, match=r"; NameError: .* \(.*plugin_toys\.py:\d+\)$"):
        load(["calling"], {})


def test_a_required_plugin_must_be_enabled() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["full"], {}, ["guard"])
    assert str(caught.value) == "plugin 'guard' is in plugins.required and not in plugins.enabled; add it there"


@pytest.mark.parametrize(
    ("name", "table", "text"),
    [
        ("full", {"color": "blue"}, "config key 'full.color' is unknown; did you mean 'full.colour'?"),
        ("full", {"colour": 5}, "config key 'full.colour' is 5; it must be text"),
        ("full", "blue", "config key 'full' is a value; it must be a section"),
        ("late", {"x": 1}, "config key 'late.x' is unknown"),
    ],
)
def test_a_section_that_does_not_fit_is_an_error(name: str, table: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([name], {name: table})
    assert str(caught.value).startswith(text)


async def test_a_hook_is_asked_of_those_that_override_it_and_of_nobody_else() -> None:
    plugins = load(["late", "full"], {"full": {"colour": "blue"}})
    results = await plugins.call("martlet_stages", broker=None)
    assert [name for name, _ in results] == ["late", "full"]
    results = await plugins.call("martlet_reload")
    assert [name for name, _ in results] == ["full"]


async def test_a_plugin_that_raises_is_named() -> None:
    plugins = load(["full", "raising"], {})
    with pytest.raises(PluginError) as caught:
        await plugins.call("martlet_protocols", broker=None)
    text = str(caught.value)
    assert text.startswith("plugin 'raising' failed in martlet_protocols; ValueError: no port today (")
    assert re.search(r"plugin_toys\.py:\d+\)$", text), "the file and the line of the plugin's own code"


async def test_a_plugin_that_hangs_is_named(mock_clock: MockClock) -> None:
    plugins = load(["hanging", "full"], {})
    told: list[str] = []

    async def call() -> None:
        with pytest.raises(PluginError) as caught:
            await plugins.call("martlet_stages", broker=None)
        told.append(str(caught.value))

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            while not Hanging.entered.is_set():
                await trio.lowlevel.checkpoint()
            mock_clock.jump(10)
    finally:
        Hanging.let_go.set()
    assert told == ["plugin 'hanging' failed in martlet_stages; it did not return within 10 s"]


def test_a_filter_that_raises_is_refused_and_named_in_the_log_once(logged: pytest.LogCaptureFixture) -> None:
    def compile_dividing(expression: str) -> Predicate:
        number = int(expression)
        if number < 0:
            raise Refused(Reason.ILLEGAL, "no numbers below 0")
        return lambda record: record.queue_id // number > 0

    compiled = guarded_filter("toys", "DIVIDE", compile_dividing)
    record = RecordView(encode_record(Message("t", b"x"), 4, 0, 0, 0, bytes(8)))
    assert compiled("2")(record)
    raising = compiled("0")
    for _ in range(3):
        with pytest.raises(Refused, match="plugin 'toys' failed in its filter DIVIDE; ZeroDivisionError") as caught:
            raising(record)
        assert caught.value.reason is Reason.UNAVAILABLE
    assert len({id(line) for line in logged.records if "failed in its filter DIVIDE on '0'" in line.getMessage()}) == 1
    with pytest.raises(Refused, match="plugin 'toys' failed in its filter DIVIDE; ValueError"):
        compiled("x")
    with pytest.raises(Refused, match="no numbers below 0"):
        compiled("-1")


def test_a_condition_stays_one_and_its_search_is_guarded_too(logged: pytest.LogCaptureFixture) -> None:
    steps = [0]

    def compile_condition(expression: str) -> Condition:
        def find(data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
            return [begin + int(expression)]

        return Condition(lambda record: record.queue_id == int(expression), 7, find, steps)

    compiled = guarded_filter("toys", "EQUAL", compile_condition)
    record = RecordView(encode_record(Message("t", b"x"), 4, 0, 0, 0, bytes(8)))
    good, bad = compiled("4"), compiled("x")
    assert isinstance(good, Condition)
    assert isinstance(bad, Condition)
    assert (good(record), good.cost, good.steps) == (True, 7, steps)
    assert good.find is not None
    assert good.find(b"", 1, 2) == [5]
    assert bad.find is not None
    with pytest.raises(Refused, match="plugin 'toys' failed in its filter EQUAL; ValueError"):
        bad(record)
    with pytest.raises(Refused, match="plugin 'toys' failed in its filter EQUAL; ValueError"):
        bad.find(b"", 1, 2)
    assert len({id(line) for line in logged.records if "failed in its filter EQUAL on 'x'" in line.getMessage()}) == 1
    plain = guarded_filter("toys", "ALL", lambda expression: Condition(lambda record: True))("x")
    assert isinstance(plain, Condition)
    assert plain.find is None


def test_two_plugins_cannot_have_one_name() -> None:
    plugins = Plugins()
    plugins.add("a", Hooks(None))
    with pytest.raises(PluginError, match="'a' does not fit"):
        plugins.add("a", Hooks(None))


# in a broker


async def running(*enabled: str, disk: FakeDisk | None = None) -> dict[str, str]:
    """Run a broker with the plugins *enabled* until it is ready; return its addresses."""
    addresses: dict[str, str] = {}
    stop = trio.Event()

    def ready(bound: dict[str, str]) -> None:
        addresses.update(bound)
        stop.set()

    config = Config(
        broker=BrokerConfig(data="/data"), store=small_config(flush="async"), plugins=PluginsConfig(list(enabled))
    )
    await run(config, ready=ready, disk=disk or FakeDisk(), stop=stop)
    return addresses


async def test_the_core_runs_with_no_plugin_at_all() -> None:
    assert await running() == {}


async def test_a_broker_with_a_plugin_that_fails_does_not_start() -> None:
    with pytest.raises(PluginError, match="plugin 'raising' failed in martlet_protocols; ValueError: no port today"):
        await running("full", "raising")
    with pytest.raises(PluginError, match="plugin 'failing_guard' failed in martlet_services; RuntimeError"):
        await running("full", "failing_guard")


class Stumbling(Hooks):
    """An authorizer whose rules cannot be reloaded."""

    reloads = 0

    def martlet_authorizers(self, broker: Broker) -> Sequence[Authorizer]:
        return ()

    def martlet_reload(self) -> None:
        type(self).reloads += 1
        raise OSError("the rules are not there")


async def test_a_plugin_that_cannot_reload_stays_and_is_asked_again(logged: pytest.LogCaptureFixture) -> None:
    plugins = Plugins(required=["stumbling"])
    plugins.add("stumbling", Stumbling(None))
    for _ in range(2):
        await plugins.tell("martlet_reload")
    assert Stumbling.reloads == 2
    assert [plugin.name for plugin in plugins] == ["stumbling"]
    assert "plugin 'stumbling' failed in martlet_reload; OSError: the rules are not there" in logged.text


class Lingering(Hooks):
    """Never returns from its shutdown hook."""

    def __init__(self, config: None) -> None:
        super().__init__(config)
        self.let_go = threading.Event()

    def martlet_stopping(self) -> None:
        self.let_go.wait(60)


class Leaving(Hooks):
    """Says goodbye."""

    def __init__(self, config: None) -> None:
        super().__init__(config)
        self.said = threading.Event()

    def martlet_stopping(self) -> None:
        self.said.set()


async def test_a_plugin_that_hangs_in_its_goodbye_keeps_no_other_from_its_own(
    mock_clock: MockClock, logged: pytest.LogCaptureFixture
) -> None:
    plugins, lingering, leaving = Plugins(), Lingering(None), Leaving(None)
    plugins.add("lingering", lingering)
    plugins.add("leaving", leaving)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(plugins.tell, "martlet_stopping", 4.0)
            assert await trio.to_thread.run_sync(leaving.said.wait, 30)
            mock_clock.jump(4)
    finally:
        lingering.let_go.set()
    assert "plugin 'lingering' failed in martlet_stopping; PluginError: it did not return within 4 s" in logged.text


class Slow(Hooks):
    """Has a service that says when it is ready, and creates a topic in a hook."""

    ready: ClassVar[trio.Event]
    fails: ClassVar[bool] = False

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        broker.topics.ensure("made-in-a-hook", 3)

        async def serve(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            if self.fails:
                raise OSError("no table of routes")
            await self.ready.wait()
            task_status.started()
            await trio.sleep_forever()

        return [serve]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[Slow]:
    """The plugin *full* is a `Slow` one."""
    monkeypatch.setattr(Slow, "ready", trio.Event(), raising=False)
    monkeypatch.setattr(plugins, "load_class", lambda name, entry: Slow)
    return Slow


async def test_the_broker_is_ready_once_its_services_are(slow: type[Slow], nursery: trio.Nursery) -> None:
    done: list[bool] = []

    async def run_it() -> None:
        await running("full")
        done.append(True)

    nursery.start_soon(run_it)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert done == []
    slow.ready.set()
    while not done:
        await trio.lowlevel.checkpoint()


class Unsigned(Hooks):
    """Has a service without a signature, like some callables written in C."""

    calls = 0

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        return [self]

    @property
    def __signature__(self) -> Signature:
        raise ValueError("no signature found")

    async def __call__(self) -> None:
        Unsigned.calls += 1
        await trio.sleep_forever()


async def test_a_service_without_a_signature_is_ready_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call returns once all services are ready, although this one runs for ever."""
    monkeypatch.setattr(plugins, "load_class", lambda name, entry: Unsigned)
    monkeypatch.setattr(Unsigned, "calls", 0)
    await running("full")
    assert Unsigned.calls == 1


async def test_a_service_that_fails_before_it_is_ready_ends_the_start(
    slow: type[Slow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "fails", True)
    text = "service of plugin 'full' failed before it was ready; OSError: no table of routes"
    with pytest.raises(PluginError, match=text):
        await running("full")


async def test_a_topic_created_in_a_hook_is_on_the_disk_before_the_ports_open(slow: type[Slow]) -> None:
    slow.ready.set()
    disk, stop, found = FakeDisk(), trio.Event(), []

    def ready(bound: dict[str, str]) -> None:
        fd = disk.open("/data/config/topics.json", read_only=True)
        found.append(disk.read(fd, disk.size(fd), 0))
        disk.close(fd)
        stop.set()

    config = Config(
        broker=BrokerConfig(data="/data"), store=small_config(flush="async"), plugins=PluginsConfig(["full"])
    )
    await run(config, ready=ready, disk=disk, stop=stop)
    topic = orjson.loads(found[0])["topicConfigTable"]["made-in-a-hook"]
    assert topic["readQueueNums"] == 3


def test_a_key_listen_that_is_no_address_is_left_to_its_plugin() -> None:
    off, path = SimpleNamespace(listen=""), SimpleNamespace(listen="/run/martlet.sock")
    _check_addresses({"a": off, "b": off, "c": path, "d": path, "e": None, "f": SimpleNamespace(listen=["x:1"])})
