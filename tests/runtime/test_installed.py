"""What is installed is found as `importlib.metadata` finds it, which takes longer to import."""

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from martlet.runtime import installed
from martlet.runtime.installed import EntryPoint, entry_points, installed_version

ENTRIES = """
[console_scripts]
tool = toys:main

[martlet.plugins]
# a comment
toy = toys.inner : Toy.Inner [extra]
module=toys
"""


def install(folder: Path, name: str, version: str, entries: str = "", suffix: str = "dist-info") -> None:
    """Write the metadata of a distribution to *folder*."""
    there = folder / f"{name}-{version}.{suffix}"
    there.mkdir(parents=True)
    file = "METADATA" if suffix == "dist-info" else "PKG-INFO"
    (there / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nVersion: of the text\n")
    (there / "entry_points.txt").write_text(entries)


@pytest.mark.parametrize("group", ["martlet.plugins", "console_scripts", "pytest11", "nobody.has.it"])
def test_the_entry_points_here_are_found(group: str) -> None:
    found = {(each.name, each.value, each.group) for each in entry_points(group)}
    assert found == {(each.name, each.value, each.group) for each in metadata.entry_points(group=group)}


def test_the_version_is_that_of_the_distribution() -> None:
    assert installed_version() == metadata.version("martlet")


def test_entries_name_their_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in ("dist-info", "egg-info"):
        install(tmp_path / suffix, "martlet_toys", "1.5", ENTRIES, suffix)
        monkeypatch.setattr(sys, "path", [str(tmp_path / "missing"), str(tmp_path / suffix)])
        found = entry_points("martlet.plugins")
        assert [each[:2] for each in found] == [("toy", "toys.inner : Toy.Inner [extra]"), ("module", "toys")]
        assert {(each.distribution, each.version) for each in found} == {("martlet_toys", "1.5")}


def test_of_two_distributions_with_one_name_the_first_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "a", "martlet_toys", "1", "[martlet.plugins]\nnew = toys\n")
    install(tmp_path / "b", "Martlet.Toys", "2", "[martlet.plugins]\nold = toys\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), str(tmp_path / "b")])
    assert [each.name for each in entry_points("martlet.plugins")] == ["new"]


def test_an_entry_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toys_to_load.py").write_text("class Toy:\n    class Inner: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint("toy", "toys_to_load : Toy.Inner [extra]", "martlet.plugins")
    assert entry.module == "toys_to_load"
    assert getattr(entry.load(), "__qualname__", "") == "Toy.Inner"
    assert EntryPoint("toy", "toys_to_load", "martlet.plugins").load() is sys.modules["toys_to_load"]


def test_distributions_in_an_archive_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("toys-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: toys\nVersion: 1\n")
        file.writestr("toys-1.dist-info/entry_points.txt", "[martlet.plugins]\ntoy = toys\n")
        file.writestr("martlet-7.dist-info/METADATA", "Metadata-Version: 2.1\nName: martlet\nVersion: 7\n")
    monkeypatch.setattr(sys, "path", [str(archive), *sys.path])
    assert ("toy", "toys") in {each[:2] for each in entry_points("martlet.plugins")}
    assert installed_version() == "7"


def test_without_a_distribution_the_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert installed_version() == "(not installed)"
    assert entry_points("martlet.plugins") == []


def test_a_start_does_not_import_the_parsers_of_metadata() -> None:
    code = f"import {installed.__name__}, martlet.plugins.loader, martlet.cli.run, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"importlib.metadata", "email.message", "zipfile"} & set(modules)
