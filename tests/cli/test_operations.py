"""The commands of the page on operations, run as they are printed, with other folders and ports."""

import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from tests.client.patient import PATIENCE_S, patient

from martlet.cli.outcome import Exit
from martlet_client import Message, NameServerUnreachable, Producer

from .conftest import Process

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
UNIT = ROOT / "examples" / "systemd" / "martlet.service"
PROXY = ROOT / "examples" / "haproxy" / "haproxy.cfg"


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


class Machine:
    """A folder in place of the machine's /etc, /opt and /var; stand-ins for what needs root note their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.touch()
        for name in ("apt-get", "useradd", "systemctl", "journalctl", "chgrp"):
            self.script(folder / "bin" / name, f'echo "{name} $*" >>{self.notes}')
        note = f'echo "python3 $*" >>{self.notes}; ! [[ "$1 $2" == "-m venv" ]] || {self.venv_maker()}'
        self.script(folder / "bin" / "python3", note)
        (folder / "etc" / "systemd" / "system").mkdir(parents=True)

    def venv_maker(self) -> str:
        """A command that makes a virtual environment whose pip installs nothing, for Martlet is there already."""
        for name, does in (
            ("pip", f'echo "pip $*" >>{self.notes}'),
            ("martlet", f'exec {sys.executable} -m martlet "$@"'),
        ):
            self.script(self.folder / "venv" / "bin" / name, does)
        return f'cp -r {self.folder / "venv"} "$3"'

    def script(self, path: Path, does: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{does}\n")
        path.chmod(0o755)

    def here(self, text: str) -> str:
        """Return *text* with the folders of this machine, and the name that its certificates can have."""
        text = text.replace("mq.example.org", "localhost")
        return re.sub(r"(?<![\w.])/(etc|opt|var)/", rf"{self.folder}/\1/", text)

    def run(self, commands: str, **environment: str) -> str:
        (self.folder / "opt").mkdir(exist_ok=True)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.here(commands)],
            cwd=ROOT,
            env={**os.environ, **environment, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_page_shows_the_unit() -> None:
    assert blocks("ini", PAGE) == [UNIT.read_text()]


def test_the_page_shows_the_configuration_of_a_proxy() -> None:
    assert blocks("haproxy", PAGE) == [PROXY.read_text()]


def test_the_unit_agrees_with_the_commands(machine: Machine) -> None:
    install, *_ = blocks("sh", section("As a service"))
    machine.run(install)
    unit = (machine.folder / "etc/systemd/system/martlet.service").read_text()
    said = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    assert f" {said['User']}\n" in re.findall(r"useradd .*\n", machine.notes.read_text())[0]
    assert f"/var/lib/{said['StateDirectory']}" in said["ExecStart"].split()
    assert machine.here(said["ExecStart"]).split()[:3] == [
        f"{machine.folder}/opt/martlet/bin/martlet",
        "run",
        "--config",
    ]
    assert "systemctl enable --now martlet\n" in machine.notes.read_text()


def test_the_unit_does_not_try_a_wrong_configuration_again(machine: Machine) -> None:
    """systemd starts a unit again after a failed ExecStartPre; only the exit code of the main process prevents that."""
    install, *_ = blocks("sh", section("As a service"))
    machine.run(install)
    said = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    assert not {"ExecStartPre", "ExecCondition"} & set(said)
    config = machine.folder / "etc/martlet/martlet.toml"
    config.write_text(config.read_text() + "\n[nonsense]\nkey = 1\n")
    done = subprocess.run(machine.here(said["ExecStart"]).split(), capture_output=True, text=True, check=False)
    assert str(done.returncode) in said["RestartPreventExitStatus"].split()
    assert "nonsense" in done.stderr


def test_the_unit_exposes_little_of_the_machine_and_starts_again_after_a_conflict_of_ports() -> None:
    said = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE))
    assert set(said["RestartPreventExitStatus"].split()) == {str(Exit.USAGE), str(Exit.UNUSABLE)}
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout  # not above 2.0
    assert re.search(r"Overall exposure level for martlet.service: [01]\.\d OK", done.stdout)


def test_the_service_answers_the_commands_that_try_it(machine: Machine) -> None:
    install, attempt, *_ = blocks("sh", section("As a service"))
    machine.run(install)
    broker = Process(machine.folder, "run", "--config", str(machine.folder / "etc/martlet/martlet.toml"))
    try:
        said = machine.run(attempt, NAMESRV_ADDR=broker.addresses()["nameserver"])
        assert "stored" in said
        assert said.count("hello, world\n") == 1
    finally:
        broker.stop()


@contextmanager
def secured(machine: Machine, *, client_certificates: bool = False) -> Iterator[dict[str, str]]:
    """Follow the page, and run a broker with its TLS configuration on free ports; yields its addresses."""
    install = blocks("sh", section("As a service"))[0]
    make, _, make_client = blocks("sh", section("TLS"))
    machine.run(install)
    machine.run(make)
    config, client_config = blocks("toml", section("TLS"))
    if client_certificates:
        machine.run(make_client)
        for name in ("remoting", "nameserver"):
            line = re.search(r"^tls_client_ca = .*\n", client_config, re.MULTILINE)
            assert line is not None
            config = config.replace(f"[{name}]\n", f"[{name}]\n{line[0]}")
    (machine.folder / "etc/martlet/martlet.toml").write_text(machine.here(config))
    broker = Process(
        machine.folder, "run", "--config", str(machine.folder / "etc/martlet/martlet.toml"), remoting="127.0.0.1:0"
    )
    try:
        yield broker.addresses()
    finally:
        broker.stop()


REFUSED_S = 5.0  # a client tries again for this long before it says that it was refused


async def send(name_server: str, tls: ssl.SSLContext | None, timeout_s: float = PATIENCE_S) -> None:
    settings = patient(name_server, tls=tls)
    async with Producer(settings, "operators", send_timeout_s=timeout_s) as producer:
        await producer.send(Message("Secure", b"body"))


def test_both_ports_are_secured_by_the_page(machine: Machine) -> None:
    check = blocks("sh", section("TLS"))[1]
    with secured(machine) as addresses:
        ports = [address.rpartition(":")[2] for address in (addresses["nameserver"], addresses["remoting"])]
        said = machine.run(check.replace("9876 10911", " ".join(ports)))
        assert said.count("Verification: OK") == 2
        name_server = f"localhost:{ports[0]}"
        trio.run(send, name_server, ssl.create_default_context(cafile=machine.here("/etc/martlet/tls/ca.pem")))
        with pytest.raises(NameServerUnreachable):
            trio.run(send, name_server, None, REFUSED_S)


def test_clients_without_a_certificate_are_refused_if_the_page_is_followed(machine: Machine) -> None:
    context = ssl.create_default_context
    with secured(machine, client_certificates=True) as addresses:
        name_server = f"localhost:{addresses['nameserver'].rpartition(':')[2]}"
        folder = machine.folder / "etc/martlet/tls"
        anonymous, billing = context(cafile=folder / "ca.pem"), context(cafile=folder / "ca.pem")
        with pytest.raises(NameServerUnreachable):
            trio.run(send, name_server, anonymous, REFUSED_S)
        billing.load_cert_chain(folder / "billing.pem", folder / "billing-key.pem")
        trio.run(send, name_server, billing)
