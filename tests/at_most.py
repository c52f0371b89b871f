"""The option ``--at-most N``: run no more than N of the parameter sets of each test.

For a run of tests that all passed shortly before, on modules of another build: what can differ there is how a line
runs, and a few parameter sets run the same lines as a product of hundreds. Which ones run depends on their names only,
so each run and each worker of it has the same; names are mixed, because a step through a product may meet one value of
a parameter again and again.
"""

from collections import defaultdict
from zlib import crc32

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--at-most", type=int, metavar="N", help="run at most N of the parameter sets of each test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    most = config.getoption("at_most")
    if most is None:
        return
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item.nodeid)
    chosen = {node for nodes in tests.values() for node in sorted(nodes, key=_mixed)[:most]}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def _mixed(node: str) -> int:
    return crc32(node.encode())
