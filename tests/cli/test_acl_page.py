"""The commands of the page on access control, run as they are printed, against one broker."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from martlet.config import fill
from martlet_acl.config import AclConfig
from martlet_mqtt.config import MqttConfig

from .conftest import Process
from .page_shell import PageShell

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "acl.md").read_text()
SECTION = PAGE.partition("## From nothing to a locked broker\n")[2].partition("\n## ")[0]
INIT, USERS, RULES, TRY, EXPLAIN, LOCK, LATER = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
(QUOTAS,) = re.findall(r"```sh\n(.*?)```", PAGE.partition("\n## Quotas\n")[2].partition("\n## ")[0], re.DOTALL)
(CONFIG,) = re.findall(r"```toml\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[PageShell]:
    found = PageShell(tmp_path)
    yield found
    found.close()


def test_the_page_locks_a_broker(shell: PageShell, tmp_path: Path) -> None:
    folder = tmp_path
    environment = {"MARTLET_CONFIG": str(folder / "martlet.toml")}

    def run(commands: str) -> str:
        return shell.run(commands, environment)

    config = folder / "martlet.toml"
    config.write_text(f'[broker]\ndata = "{folder}/data"\n')
    said = run(INIT)
    assert CONFIG in said
    config.write_text(config.read_text() + CONFIG)
    process = Process(folder, "run", "--config", str(config), "--set", "store.flush=async")
    try:
        addresses = process.addresses()
        environment |= {"NAMESRV_ADDR": addresses["nameserver"], "MARTLET_MQTT": addresses["mqtt"]}
        process.until((folder / "data" / "acl.sock").is_socket)
        assert "user alice was added" in run(USERS)
        run(RULES)
        assert "group:shop  bytes_in 1000000, refuses\n" in run(QUOTAS)
        said = run(TRY)
        assert "martlet acl allow user:alice publish name:mqtt/home/bob/door" in said
        said = run(EXPLAIN)
        assert "alice may publish topic:orders\n" in said
        assert "alice may not publish name:mqtt/home/bob/door from 10.1.2.3\n" in said
        run(LOCK)
        denied = TRY.splitlines()[2]
        assert "home/bob" in denied
        run(f"! {denied}")
        run(TRY.splitlines()[1])
        run(LATER)
        run(f"! {TRY.splitlines()[0]}")
        run(f"! {TRY.splitlines()[1]}")
        assert process.stop() == 0
    finally:
        process.end()


def test_the_settings_of_the_page_are_settings() -> None:
    filled: set[str] = set()
    for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL):
        tables = tomllib.loads(text)
        for name, settings in (("acl", AclConfig), ("mqtt", MqttConfig)):
            if name in tables:
                fill(settings, tables[name], name)  # refuses what is no setting
                filled.add(name)
    assert filled == {"acl", "mqtt"}


def test_every_command_of_the_page_is_tried() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert blocks == [INIT, USERS, RULES, TRY, EXPLAIN, LOCK, LATER, QUOTAS]
