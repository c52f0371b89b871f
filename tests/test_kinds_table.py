"""The table in tests/interop/README.md, of kinds of messages and clients, names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

from .interop.fetch import CLIENT_VERSIONS

INTEROP = Path(__file__).parent / "interop"
README = (INTEROP / "README.md").read_text()
CLIENTS = ["Java 4.9.8", "Java 5.5.0", "Go", "Node", "C++", "Python"]
KINDS = [
    "normal",
    "in order",
    "batch",
    "delay level",
    "timed",
    "recall",
    "transaction",
    "SQL92",
    "retry",
    "dead letter",
    "POP",
    "POP in order",
    "dead letter of POP",
    "request and reply",
    "broadcast",
    "from first or last",
    "from a time",
    "reset",
    "pushed reset",
    "running info",
    "consumed on request",
    "trace",
]
EACH_VERSION = {"java", "clients"}  # the fixtures that run a test with each Java client
REASONS = re.findall(r"^- ([^:]+): (.+)$", README, re.MULTILINE)
LINK = re.compile(r'\[yes\]\((\w+\.py) "([^"]+)"\)')


def table() -> dict[str, dict[str, str]]:
    """Return kind -> client -> cell."""
    lines = README[README.index("| kind |") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["kind", *CLIENTS]
    return {row[0]: dict(zip(CLIENTS, row[1:], strict=True)) for row in rows[2:]}


def has_test(file: str, test: str) -> bool:
    """Whether *file* has a test of that name, with its parameter in brackets if it has one."""
    name, _, parameter = test.rstrip("]").partition("[")
    tree = ast.parse((INTEROP / file).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    [function] = [node for node in functions if node.name == name]
    if any(argument.arg in EACH_VERSION for argument in function.args.args):
        return parameter in CLIENT_VERSIONS
    values = {
        node.value for each in function.decorator_list for node in ast.walk(each) if isinstance(node, ast.Constant)
    }
    return parameter in values if parameter else not function.decorator_list


def test_every_kind_has_a_row() -> None:
    assert list(table()) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_cell_names_a_test_or_a_reason(kind: str) -> None:
    for client, cell in table()[kind].items():
        if cell == "—":
            [reason] = [text for kinds, text in REASONS if kind in kinds.split(", ")]
            assert client in reason, f"the README does not say why there is no test of {kind} with {client}"
        else:
            found = LINK.fullmatch(cell)
            assert found, f"{kind} with {client}: {cell!r} is neither a link nor a dash"
            assert has_test(found[1], found[2])
