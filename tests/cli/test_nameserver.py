"""``martlet nameserver`` with users: it loads the plugins that know them, and no others of the configuration."""

import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.interop import wire
from tests.users_plugin import users_plugin

from martlet.app.config import PluginsConfig
from martlet.broker import Broker
from martlet.cli.outcome import Exit
from martlet.contracts import Authorizer
from martlet.errors import PluginError
from martlet.plugins import loader
from martlet.plugins.hooks import Hooks
from martlet.runtime.installed import EntryPoint
from martlet_remoting.commands.nameserver import enabled_plugins
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.signatures import SigningKey

from .conftest import Process

KV = RequestCode.PUT_KV_CONFIG
TEXT: Mapping[str, object] = {"namespace": "n", "key": "k", "value": "v"}
APP = SigningKey("app", "app's secret")
USERS = """
[users.ann]
signing_key = "ann's secret"
rules = ["manage *"]
"""


def said(address: str, fields: Mapping[str, object]) -> wire.Answer:
    answer = wire.ask(address, KV, {name: str(value) for name, value in fields.items()})
    assert answer is not None
    return answer


def test_a_name_server_alone_knows_its_clients(tmp_path: Path, start: Callable[..., Process]) -> None:
    (tmp_path / "users.toml").write_text(USERS)
    words = ["nameserver", "--set", 'plugins.enabled=["remoting", "mqtt", "nameserver", "users"]']
    words += ["--set", f"users.file={json.dumps(str(tmp_path / 'users.toml'))}"]
    process = start(*words, environment=users_plugin(tmp_path))
    addresses = process.addresses()
    assert list(addresses) == ["nameserver"]
    assert "plugins nameserver, users" in process.log.read_text()
    address = addresses["nameserver"]
    refused = said(address, TEXT)
    assert (refused.code, refused.remark) == (ResponseCode.NO_PERMISSION, "'' may not update the cluster")
    for secret, code in ("ann's secret", 0), ("a guess", ResponseCode.NO_PERMISSION):
        assert said(address, SigningKey("ann", secret).sign(KV, TEXT, b"")).code == code
    assert process.stop() == Exit.OK


class Cluster:
    """A name server that knows a user for brokers and one for clients, and brokers that it may know."""

    def __init__(self, folder: Path, start: Callable[..., Process]) -> None:
        self.folder = folder
        self._start = start
        self.write_users("one")
        words = ["nameserver", "--set", 'plugins.enabled=["nameserver", "users"]']
        words += ["--set", f"users.file={json.dumps(str(folder / 'users.toml'))}"]
        self.nameserver = start(*words, folder=folder / "names", environment=users_plugin(folder))
        self.address = self.nameserver.addresses()["nameserver"]

    def write_users(self, secret: str) -> None:
        users = {"broker": (secret, ["manage *", "read *"]), "app": ("app's secret", ["publish *", "read *"])}
        lines = [
            f"[users.{name}]\nsigning_key = {json.dumps(key)}\nrules = {json.dumps(rules)}\n"
            for name, (key, rules) in users.items()
        ]
        (self.folder / "users.toml").write_text("".join(lines))

    def write_secret(self, name: str, secret: str) -> Path:
        path = self.folder / f"secret of {name}"
        path.write_text(secret + "\n")
        path.chmod(0o600)
        return path

    def broker(self, name: str, secret: str) -> tuple[Process, str]:
        """Start a broker that signs with *secret*; return it and its address."""
        settings = {
            "broker.name": name,
            "plugins.enabled": '["remoting"]',
            "remoting.nameservers": json.dumps([self.address]),
            "remoting.nameservers_key": "broker",
            "remoting.nameservers_secret_file": json.dumps(str(self.write_secret(name, secret))),
            "remoting.register_s": "1",
            "store.flush": "async",
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        process = self._start("run", *words, folder=self.folder / name)
        return process, process.addresses()["remoting"]

    def ask(self, code: int, fields: Mapping[str, object], key: SigningKey | None = APP) -> wire.Answer:
        signed = fields if key is None else key.sign(code, fields, b"")
        answer = wire.ask(self.address, code, {name: str(value) for name, value in signed.items()})
        assert answer is not None
        return answer

    def brokers_of(self, topic: str) -> set[str]:
        answer = self.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, "acceptStandardJsonOnly": "true"})
        assert answer.code in (0, ResponseCode.TOPIC_NOT_EXIST)
        return {queues["brokerName"] for queues in json.loads(answer.body)["queueDatas"]} if answer.body else set()


def test_brokers_prove_themselves_to_a_name_server(tmp_path: Path, start: Callable[..., Process]) -> None:
    cluster = Cluster(tmp_path, start)
    (first, address), (second, _) = cluster.broker("a", "one"), cluster.broker("b", "one")
    stranger, _ = cluster.broker("c", "a guess")
    stranger.until(lambda: "registration failed" in stranger.log.read_text())
    first.until(lambda: cluster.brokers_of("TBW102") == {"a", "b"})
    assert "access key 'broker' or the signature is wrong; user 'broker' of remoting" in stranger.log.read_text()
    route = {"topic": "TBW102"}
    code = RequestCode.GET_ROUTEINFO_BY_TOPIC
    assert cluster.ask(code, route, None).code == ResponseCode.TOPIC_NOT_EXIST
    assert cluster.ask(code, route, SigningKey("app", "x")).code == ResponseCode.NO_PERMISSION
    # A broker asks for the queues of the other one in its own name.
    body = json.dumps({"consumerGroup": "G", "topic": "BenchmarkTest", "messageModel": "BROADCASTING"})
    found = wire.ask(address, RequestCode.QUERY_ASSIGNMENT, {}, body.encode())
    assert found is not None
    named = {each["messageQueue"]["brokerName"] for each in json.loads(found.body)["messageQueueAssignments"]}
    assert named == {"a", "b"}
    # The secret changes at the name server first: the routes stay until the brokers have it, too.
    cluster.write_users("two")
    cluster.nameserver.child.send_signal(signal.SIGHUP)
    for broker in first, second:
        broker.until(lambda log=broker.log: "registration failed" in log.read_text())  # type: ignore[misc]
    assert cluster.brokers_of("TBW102") == {"a", "b"}
    for name, broker in ("a", first), ("b", second):
        cluster.write_secret(name, "two")
        broker.child.send_signal(signal.SIGHUP)
        broker.until(lambda log=broker.log: log.read_text().count("registered with name server") == 2)  # type: ignore[misc]
    assert cluster.brokers_of("TBW102") == {"a", "b"}
    assert first.stop() == Exit.OK
    second.until(lambda: cluster.brokers_of("TBW102") == {"b"})


class Guard(Hooks):
    """A plugin that authorizes."""

    def martlet_authorizers(self, broker: Broker) -> list[Authorizer]:
        return []


class Stranger(Hooks):
    """A plugin that does not."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"nameserver": "not.imported:X", "mqtt": "not.imported:X", "broken": "not.there:X"}
    places |= {"guard": f"{__name__}:Guard", "stranger": f"{__name__}:Stranger"}
    entries = {name: EntryPoint(name, place, loader.GROUP) for name, place in places.items()}
    monkeypatch.setattr(loader, "available", lambda: entries)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("enabled", "loaded"),
    [
        (["remoting", "mqtt"], ["nameserver"]),
        (["nameserver", "mqtt", "stranger", "guard"], ["nameserver", "guard"]),
        (["guard", "stranger", "nameserver"], ["guard", "nameserver"]),
        (["guard"], ["nameserver", "guard"]),
        (["missing"], ["nameserver", "missing"]),
    ],
)
def test_it_loads_itself_and_guards(enabled: list[str], loaded: list[str]) -> None:
    found = enabled_plugins(PluginsConfig(enabled=enabled, required=enabled[-1:]))
    assert found.enabled == loaded
    assert found.required == [name for name in enabled[-1:] if name in loaded]


@pytest.mark.usefixtures("installed")
def test_it_does_not_start_without_a_plugin_that_may_be_a_guard() -> None:
    with pytest.raises(PluginError, match="plugin 'broken' cannot be imported"):
        enabled_plugins(PluginsConfig(enabled=["nameserver", "broken"]))
