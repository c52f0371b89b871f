"""The installed distributions: their versions and entry points, from the files that pip has written.

`importlib.metadata` knows the same. But it also brings parsers of mails, archives and CSV files, and importing it takes
a tenth of the processor time of a broker's start. It is used if a place of ``sys.path`` is an archive.
"""

import os
import re
import sys
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from typing import Final, NamedTuple

__all__ = ["EntryPoint", "entry_points", "installed_version"]

SEPARATORS: Final = re.compile("[-_.]+")
SUFFIXES: Final = (".dist-info", ".egg-info")


class EntryPoint(NamedTuple):
    """A line ``name = module:attribute`` of a distribution, in the section *group*.

    ``folder`` has the metadata of the distribution; it is empty if that is in an archive.
    """

    name: str
    value: str
    group: str
    folder: str = ""

    @property
    def distribution(self) -> str:
        """The name of the distribution; empty if it is in an archive."""
        return _field(self.folder, "Name")

    @property
    def version(self) -> str:
        """The version of the distribution; empty if it is in an archive."""
        return _field(self.folder, "Version")

    @property
    def module(self) -> str:
        return self.value.partition(":")[0].strip()

    def load(self) -> object:
        """Import the module, and return the attribute, or the module if the line names none."""
        attributes = self.value.partition("[")[0].partition(":")[2].strip()
        return reduce(getattr, filter(None, attributes.split(".")), import_module(self.module))


def entry_points(group: str) -> list[EntryPoint]:
    """Return the entry points of *group* of all distributions; of those with the same name the first is installed."""
    found: list[EntryPoint] = []
    folders: dict[str, str] = {}
    try:
        for name, folder in _folders():
            folders.setdefault(name, folder)
    except NotADirectoryError:
        from importlib import metadata

        return [EntryPoint(each.name, each.value, each.group) for each in metadata.entry_points(group=group)]
    for folder in folders.values():
        found += _entries_in(folder, group)
    return found


def installed_version() -> str:
    """Return the version of Martlet's distribution."""
    try:
        folder = next((folder for name, folder in _folders() if name == "martlet"), "")
    except NotADirectoryError:
        from importlib import metadata

        return next((each.version for each in metadata.distributions(name="martlet")), "(not installed)")
    return _field(folder, "Version") or "(not installed)"


def _field(folder: str, name: str) -> str:
    """Return the value of a field of the metadata in *folder*."""
    text = folder and (_text_of(f"{folder}/METADATA") or _text_of(f"{folder}/PKG-INFO"))
    lines = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")


def _folders() -> Iterator[tuple[str, str]]:
    """Yield the name of each distribution and the folder of its metadata, in the order of ``sys.path``.

    Raises:
      NotADirectoryError: a place is an archive.
    """
    for place in dict.fromkeys(sys.path):
        try:
            names = os.listdir(place or ".")
        except (FileNotFoundError, PermissionError):
            continue
        for name in names:
            if name.endswith(SUFFIXES):
                yield SEPARATORS.sub("-", name.rpartition(".")[0].partition("-")[0]).lower(), f"{place or '.'}/{name}"


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""


def _entries_in(folder: str, group: str) -> Iterator[EntryPoint]:
    section = ""
    for line in map(str.strip, _text_of(f"{folder}/entry_points.txt").splitlines()):
        if line.startswith("["):
            section = line.strip("[]")
        elif section == group and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield EntryPoint(name.strip(), value.strip(), group, folder)
