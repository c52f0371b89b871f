"""A broker needs the packages of the cold tier only if it has one."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("deltalake", "numpy", "obstore", "pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from martlet.cli.main import main
sys.exit(main())
"""
ENABLED = """
[plugins]
enabled = ["remoting", "nameserver", "tiered"]

[remoting]
listen = "127.0.0.1:0"

[nameserver]
listen = "127.0.0.1:0"

[tiered]
"""


def martlet(folder: Path, command: str, url: str) -> "subprocess.CompletedProcess[str]":
    """Run a command where no package of the cold tier is installed."""
    file = folder / "martlet.toml"
    file.write_text(f"{ENABLED}url = {url!r}\n")
    words = (
        [command, "--config", str(file), "--data", str(folder / "data")] if command == "run" else ["check", str(file)]
    )
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False, cwd=folder
    )


def test_a_start_names_what_to_install(tmp_path: Path) -> None:
    done = martlet(tmp_path, "run", str(tmp_path / "cold"))
    assert done.returncode == 2
    text = done.stderr.splitlines()[-1]
    assert "the cold tier needs the package 'pyarrow'; pip install 'martlet[tiered]'" in text
    assert "Traceback" not in done.stderr


def test_a_command_names_what_to_install(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, "tiered", "ls", "--url", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("martlet: the cold tier needs the package '")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["", "/srv/cold"])
def test_a_check_of_the_configuration_needs_none(tmp_path: Path, url: str) -> None:
    done = martlet(tmp_path, "check", url)
    assert (done.returncode, done.stderr) == (0, "")
