"""Codec and connection do no input or output and read no clock."""

import ast
from pathlib import Path

import pytest

import martlet_line

ROOM = Path(martlet_line.__file__).parent
ALLOWED = {
    "collections.abc",
    "dataclasses",
    "enum",
    "math",
    "martlet.contracts",
    "martlet.delivery.fanout",
    "martlet.errors",
    "martlet_line.codec",
    "martlet_line.packets",
    "re",
    "typing",
    "urllib.parse",
    "zlib",
}


@pytest.mark.parametrize("name", ["packets", "codec", "connection"])
def test_a_pure_room_imports_nothing_that_acts(name: str) -> None:
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOM / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            found.add(node.module)
    assert found <= ALLOWED
