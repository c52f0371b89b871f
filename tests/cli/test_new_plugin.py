"""`martlet plugins new` writes a plugin that works and can be tested as it is."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from martlet.cli.main import main


def test_what_it_writes_passes_its_own_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "new", "body_guard", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "martlet-body_guard"
    assert str(folder) in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    declared = tomllib.loads((folder / "pyproject.toml").read_text())
    [(name, place)] = declared["project"]["entry-points"]["martlet.plugins"].items()
    assert (name, place) == ("body_guard", "martlet_body_guard:BodyGuardPlugin")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Audit", "plugin name 'Audit' is invalid"),
        ("../audit", "plugin name '../audit' is invalid"),
        ("class", "plugin name 'class' is invalid"),
        ("mqtt", "plugin 'mqtt' is installed already"),
        ("there", "exists already"),
    ],
)
def test_it_writes_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str) -> None:
    (tmp_path / "martlet-there").mkdir()
    assert main(["plugins", "new", name, "--into", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["martlet-there"]
