"""``martlet nameserver`` with users: it loads the plugins that know them, and no others of the configuration."""

import json
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
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
from martlet_remoting.commands.nameserver import enabled_plugins
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.signatures import SigningKey

from .conftest import Process

KV = RequestCode.PUT_KV_CONFIG
TEXT: Mapping[str, object] = {"namespace": "n", "key": "k", "value": "v"}
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
    assert (refused.code, refused.remark) == (ResponseCode.NO_PERMISSION, "'' may not update the broker")
    for secret, code in ("ann's secret", 0), ("a guess", ResponseCode.NO_PERMISSION):
        assert said(address, SigningKey("ann", secret).sign(KV, TEXT, b"")).code == code
    assert process.stop() == Exit.OK


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
