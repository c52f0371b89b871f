"""The same frames to Martlet, ActiveMQ and RabbitMQ: each answers as docs/stomp-peers.md says."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from .martlet_process import Martlet
from .stomp_exchanges import EXCHANGES, Place
from .stomp_peers import ActiveMQ, RabbitMQ

PAGE: Final = Path(__file__).parents[2] / "docs" / "stomp-peers.md"
PEERS: Final = ("Martlet", "ActiveMQ", "RabbitMQ")
ROW: Final = re.compile(r"^\| (.*) \|$", re.MULTILINE)
_numbers = count(1)


def _table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the table under *heading*, by their first cell."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    _, *rows = [row.split(" | ") for row in ROW.findall(section)]
    return {title: cells for title, *cells in rows}


DIFFERENT: Final = _table("Where they differ")
SAME: Final = _table("Where they agree")
ANSWERS: Final = {title: cells[:3] for title, cells in DIFFERENT.items()} | {
    title: cells * 3 for title, cells in SAME.items()
}


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], int]]:
    """A function from a broker's name to its port; each starts when it is needed."""
    with ExitStack() as running:
        found: dict[str, int] = {}

        def start(name: str) -> int:
            folder = tmp_path_factory.mktemp(name)
            if name == "Martlet":
                martlet = Martlet(folder)
                running.callback(martlet.close)
                return int(martlet.stomp.rpartition(":")[2])
            peer = ActiveMQ(folder) if name == "ActiveMQ" else RabbitMQ(folder)
            running.callback(peer.close)
            return peer.port

        def of(name: str) -> int:
            if name not in found:
                found[name] = start(name)
            return found[name]

        yield of


def test_the_page_has_each_exchange_once() -> None:
    assert sorted([*DIFFERENT, *SAME]) == sorted(EXCHANGES)


def test_each_difference_is_one_and_is_explained() -> None:
    assert [title for title, (*answers, why) in DIFFERENT.items() if len(set(answers)) == 1 or not why.strip()] == []


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("title", EXCHANGES)
def test_each_broker_answers_as_the_page_says(ports: Callable[[str], int], title: str, peer: str) -> None:
    place = Place(ports(peer), f"exchange-{next(_numbers)}")
    try:
        assert EXCHANGES[title](place) == ANSWERS[title][PEERS.index(peer)]
    finally:
        place.close()
