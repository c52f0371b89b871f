"""The commands of the page on access control, run as they are printed, against one broker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Process

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "acl.md").read_text()
SECTION = PAGE.partition("## From nothing to a locked broker\n")[2].partition("\n## ")[0]
INIT, USERS, RULES, TRY, EXPLAIN, LOCK, LATER = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
(QUOTAS,) = re.findall(r"```sh\n(.*?)```", PAGE.partition("\n## Quotas\n")[2].partition("\n## ")[0], re.DOTALL)
(CONFIG,) = re.findall(r"```toml\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    script = tmp_path / "bin" / "martlet"
    script.parent.mkdir()
    script.write_text(f'#!/bin/bash\nexec {sys.executable} -m martlet "$@"\n')
    script.chmod(0o755)
    return tmp_path


def run(folder: Path, commands: str, addresses: dict[str, str] | None = None) -> str:
    found = addresses or {}
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "MARTLET_CONFIG": str(folder / "martlet.toml"),
        "NAMESRV_ADDR": found.get("nameserver", ""),
        "MARTLET_MQTT": found.get("mqtt", ""),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_page_locks_a_broker(folder: Path) -> None:
    config = folder / "martlet.toml"
    config.write_text(f'[broker]\ndata = "{folder}/data"\n')
    said = run(folder, INIT)
    assert CONFIG in said
    config.write_text(config.read_text() + CONFIG)
    process = Process(folder, "run", "--config", str(config), "--set", "store.flush=async")
    try:
        addresses = process.addresses()
        process.until((folder / "data" / "acl.sock").is_socket)
        assert "user alice was added" in run(folder, USERS)
        run(folder, RULES)
        assert "group:shop  bytes_in 1000000, refuses\n" in run(folder, QUOTAS)
        said = run(folder, TRY, addresses)
        assert "martlet acl allow user:alice publish name:mqtt/home/bob/door" in said
        said = run(folder, EXPLAIN, addresses)
        assert "alice may publish topic:orders\n" in said
        assert "alice may not publish name:mqtt/home/bob/door from 10.1.2.3\n" in said
        run(folder, LOCK, addresses)
        denied = TRY.splitlines()[2]
        assert "home/bob" in denied
        run(folder, f"! {denied}", addresses)
        run(folder, TRY.splitlines()[1], addresses)
        run(folder, LATER, addresses)
        run(folder, f"! {TRY.splitlines()[0]}", addresses)
        run(folder, f"! {TRY.splitlines()[1]}", addresses)
        assert process.stop() == 0
    finally:
        process.end()


def test_every_command_of_the_page_is_tried() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert blocks == [INIT, USERS, RULES, TRY, EXPLAIN, LOCK, LATER, QUOTAS]
