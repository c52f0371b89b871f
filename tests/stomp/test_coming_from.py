"""What the pages for users of other brokers say about keys and headers is so."""

import re
from pathlib import Path

import pytest

from martlet_stomp.wire.arguments import check_subscribe_arguments
from martlet_stomp.wire.errors import StompError

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("coming-from-*.md"))
SECTIONS = "broker|delivery|filter_sql92|mqtt|nameserver|remoting|stomp|store|timer|tx"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_key_that_a_page_names_exists(page: Path) -> None:
    keys = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_]+)(?:`| =)", page.read_text()))
    known = set(re.findall(r"^\| `([a-z_0-9]+\.[a-z_]+)`", (DOCS / "config.md").read_text(), re.MULTILINE))
    assert keys
    assert keys <= known, keys - known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_page_begins_with_what_differs(page: Path) -> None:
    headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert headings[0] == "What differs first"


def test_the_arguments_that_are_said_to_be_errors_are_errors() -> None:
    text = " ".join((DOCS / "coming-from-rabbitmq.md").read_text().split())
    said = re.search(r"\*\*Queue arguments are an ERROR, not ignored\*\*: (.*?) have ", text)
    assert said is not None
    names = re.findall(r"`([^`]+)`", said[1])
    assert len(names) > 4
    for name in names:
        argument, _, value = name.partition(":")
        with pytest.raises(StompError):
            check_subscribe_arguments({argument: value or "5"})
