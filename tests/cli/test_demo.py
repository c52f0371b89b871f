"""The demo of the README says what it installs before it does, or what is missing, and prints commands that work."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARTLET = ".demo/venv/bin/martlet"


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the demo, and a folder `bin` for the only programs that it finds besides bash."""
    shutil.copy(ROOT / "demo", tmp_path)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "environment", tmp_path / ".ci")
    for name in ("dirname", "mkdir"):
        script(tmp_path / "bin" / name, f'exec {shutil.which(name)} "$@"')
    script(tmp_path / "bin" / "id", "echo 1000")
    return tmp_path


def run(folder: Path, path: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [str(shutil.which("bash")), "./demo"],
        cwd=folder,
        env={**(environment or {}), "PATH": path, "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_without_root_and_sudo_it_says_what_root_has_to_install(checkout: Path) -> None:
    script(checkout / "bin" / "apt-get", "echo called; exit 1")
    code, output = run(checkout, str(checkout / "bin"))
    assert code == 1
    assert "missing: the Debian packages python3 python3-venv; as root, run this and then start again:" in output
    assert output.endswith("    apt-get update && apt-get install --no-install-recommends python3 python3-venv\n")


def test_without_apt_it_says_what_is_missing(checkout: Path) -> None:
    code, output = run(checkout, str(checkout / "bin"))
    assert code == 1
    assert "missing: the programs of the Debian packages python3 python3-venv; this system has no apt-get" in output


def test_only_the_module_that_makes_environments_is_missing(checkout: Path) -> None:
    script(checkout / "bin" / "apt-get", "echo called; exit 1")
    script(checkout / "bin" / "python3", '[[ $2 != *ensurepip* ]] || exit 1; [[ $1 == -c ]] || echo "unexpected $*"')
    code, output = run(checkout, str(checkout / "bin"))
    assert code == 1
    assert output.endswith("    apt-get update && apt-get install --no-install-recommends python3-venv\n")


def test_an_old_python_is_named(checkout: Path) -> None:
    script(checkout / "bin" / "python3", "[[ $1 == --version ]] && echo Python 3.9.2 || exit 1")
    code, output = run(checkout, str(checkout / "bin"))
    assert (code, output.splitlines()[-1]) == (
        1,
        "Python 3.9.2 is too old; Martlet needs Python 3.11 or newer as 'python3'",
    )


def test_with_sudo_it_says_what_it_installs_and_then_does_so(checkout: Path) -> None:
    for name in ("apt-get", "env"):
        script(checkout / "bin" / name, "true")
    script(checkout / "bin" / "sudo", 'echo "sudo $*"; [[ $* != *install* ]]')
    code, output = run(checkout, str(checkout / "bin"))
    assert code == 1
    said = output.index("missing: the Debian packages python3 python3-venv; installing them:")
    assert said < output.index("    sudo apt-get update && sudo apt-get install")
    assert output.index("\nsudo apt-get") < output.index("\nsudo env DEBIAN_FRONTEND=noninteractive apt-get ")
    assert "-y -qq --no-install-recommends python3 python3-venv" in output


def test_a_folder_of_somebody_else_is_named(checkout: Path) -> None:
    (checkout / ".demo").touch()
    code, output = run(checkout, str(checkout / "bin"))
    assert code == 1
    assert f"cannot write to {checkout}; run the demo in a clone of your own: git clone" in output


def test_it_runs_the_commands_that_it_prints(checkout: Path) -> None:
    """With an environment that has everything already, so that nothing is downloaded."""
    script(checkout / ".demo" / "venv" / "bin" / "python", "true")
    script(checkout / MARTLET, f'exec {sys.executable} -m martlet "$@"')
    code, output = run(checkout, os.environ["PATH"], os.environ)
    assert code == 0, output
    lines = output.splitlines()
    commands = [line for before, line in pairwise(lines) if not before and MARTLET in line]
    assert len(commands) == 11
    assert f"seq -f 'greeting %g' 1 5 | {MARTLET} send Greetings" in commands
    assert any(line.startswith("export NAMESRV_ADDR=127.0.0.1:") for line in lines)
    assert "Order is kept within a queue" in output
    assert sum(output.count(f"greeting {number}\n") for number in range(1, 6)) == 5
    assert "6 messages" in output
    assert "clean shutdown" in output
