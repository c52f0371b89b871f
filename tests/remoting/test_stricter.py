"""docs/remoting.md says for which requests Martlet asks other questions than RocketMQ 5.5.0."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from martlet_remoting.wire.codes import RequestCode

from .rocketmq_permissions import ASKED_BY_ROCKETMQ
from .test_permission import REQUESTS

PAGE = Path(__file__).parents[2] / "docs" / "remoting.md"
# RocketMQ has no such requests, or not any more.
OTHERS = frozenset((RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, RequestCode.DELETE_ACL_CONFIG))
OWN = range(31_001, 31_016)
KINDS: Mapping[str, str] = {
    "topic:T": "topic",
    "group:G": "group",
    "group:H": "the other group",
    "cluster": "cluster",
}

Row = tuple[list[int], str, str]


def is_implied(asked: str, by: Sequence[str]) -> bool:
    """Whether everybody who may do all of *by* may do *asked*."""
    actions, resource = asked.split()
    for other in by:
        others, about = other.split()
        if about == resource and set(others.split("|")) <= set(actions.split("|")):
            return True
    return False


def is_stricter(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return not all(is_implied(asked, theirs) for asked in ours)


def shown(asked: Sequence[str]) -> str:
    """Return *asked* in words, by resource."""
    by_resource: dict[str, list[str]] = {}
    for actions, resource in (each.split() for each in asked):
        by_resource.setdefault(" or ".join(f"`{action}`" for action in actions.split("|")), []).append(KINDS[resource])
    return ", ".join(f"{actions} {' and '.join(kinds)}" for actions, kinds in by_resource.items()) or "nothing"


def without_implied(asked: Sequence[str]) -> list[str]:
    return [each for each in asked if not is_implied(each, [other for other in asked if other != each])]


def tables() -> tuple[list[Row], list[Row]]:
    """Return the rows of the two tables: where Martlet asks for more, and where only for less or something else."""
    stricter: dict[tuple[str, str], list[int]] = {}
    different: dict[tuple[str, str], list[int]] = {}
    for code, (_, _, asked) in REQUESTS.items():
        ours, theirs = without_implied(asked), ASKED_BY_ROCKETMQ.get(code, [])
        if code in OWN or code in OTHERS:
            continue
        if is_stricter(ours, theirs) and not is_stricter(theirs, ours):
            stricter.setdefault((shown(theirs), shown(ours)), []).append(code)
        elif is_stricter(theirs, ours):
            different.setdefault((shown(theirs), shown(ours)), []).append(code)
    return rows(stricter), rows(different)


def rows(found: Mapping[tuple[str, str], list[int]]) -> list[Row]:
    return sorted((sorted(codes), theirs, ours) for (theirs, ours), codes in found.items())


def as_lines(table: Sequence[Row]) -> str:
    return "".join(f"| {', '.join(map(str, codes))} | {theirs} | {ours} |\n" for codes, theirs, ours in table)


def test_the_page_lists_requests_for_which_more_or_something_else_is_asked() -> None:
    page = PAGE.read_text()
    for table in tables():
        assert as_lines(table) in page, f"write into {PAGE.name}:\n{as_lines(table)}"
