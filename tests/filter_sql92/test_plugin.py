"""The plugin in a broker: on by default, its limits, and expressions made to be slow or to exhaust the stack."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import trio
from tests.delivery.pushing import broker_in_memory

from martlet.app.config import PluginsConfig
from martlet.config import fill
from martlet.contracts import RecordView
from martlet.errors import ConfigError, Reason, Refused
from martlet.message import Message
from martlet.records.codec import encode_record
from martlet_filter_sql92.like import STEPS_MAX, compile_like, is_slow
from martlet_filter_sql92.plugin import Sql92Config, Sql92Plugin


def plugin(**keys: object) -> Sql92Plugin:
    return Sql92Plugin(fill(Sql92Config, keys, "filter_sql92"))


def encoded(properties: Mapping[str, str]) -> bytes:
    return "".join(f"{name}\x01{text}\x02" for name, text in properties.items()).encode()


def record(**properties: str) -> RecordView:
    return RecordView(encode_record(Message("t", b"body", encoded(properties)), 0, 0, 0, 0, bytes(8)))


def refusal(text: str, **keys: object) -> str:
    with pytest.raises(Refused) as caught:
        plugin(**keys).compile(text)
    assert caught.value.reason is Reason.ILLEGAL
    return str(caught.value)


def deep(frames: int, run: Callable[[], None]) -> None:
    """Call *run* with *frames* more frames on the stack."""
    if frames:
        deep(frames - 1, run)
    else:
        run()


def test_it_is_on_by_default_and_configured() -> None:
    assert "filter_sql92" in PluginsConfig().enabled
    assert plugin().config == Sql92Config(text_bytes_max=4096, depth_max=64, nodes_max=256)
    for key, value in (("text_bytes_max", 16_385), ("depth_max", 65), ("nodes_max", 1025), ("depth_max", 0)):
        with pytest.raises(ConfigError, match=f"filter_sql92.{key}"):
            plugin(**{key: value})


def test_a_predicate_reads_the_stored_properties() -> None:
    predicate = plugin().compile("price BETWEEN 5 AND 10 AND colour IN ('red', 'grün') AND NOT (sold = TRUE)")
    assert predicate(record(price="5", colour="grün", sold="false")) is True
    assert predicate(record(price="5", colour="grün")) is False  # unknown
    assert predicate(record(price="11", colour="red", sold="no")) is False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = " + "(" * 10_000, "at character 70, near '((((((((((((((((((((': more than 64 levels of nesting"),
        ("NOT " * 4000 + "a = 1", "at character 261, near 'NOT NOT NOT NOT NOT ': more than 64 levels of nesting"),
        ("a = " + "-" * 10_000, "at character 10005, its end: expected a value"),  # it is a comment
        ("a = " + "- " * 5000 + "1", "at character 135, near '- - - - - - - - - - ': more than 64 levels of nesting"),
        ("a = 1" + " OR a = 1" * 100, "more than 256 operators and operands"),
        ("a = 1" + " + 1" * 200, "more than 256 operators and operands"),
        ("a" * 16_385, "it has 16385 bytes; the limit is 16384"),
        ("a = '" + "x" * (1 << 20) + "'", "it has 1048582 bytes; the limit is 16384"),
        ("a = '\ud800'", 'at character 6, near "\\ud800\'": half of a surrogate pair is no character'),
        ('"\udfff" = 1', "at character 2"),
    ],
    ids=lambda text: text[:20],
)
def test_an_expression_that_is_too_large_is_refused(text: str, says: str) -> None:
    found = refusal(text, text_bytes_max=16_384)
    assert says in found
    assert len(found) < 500


def test_megabytes_are_refused_before_they_are_read() -> None:
    assert refusal("(" * (1 << 20)).endswith("it has 1048576 bytes; the limit is 4096")
    assert refusal("/*" + "*" * (1 << 20)).endswith("it has 1048578 bytes; the limit is 4096")


LEVELS = {
    "parentheses": "(" * 64 + "a = 1" + ")" * 64,
    "NOT": "NOT " * 64 + "a = 1",
    "signs": "a < " + "- " * 63 + "1",
    "all kinds of operators": "a = 1 OR b = 2 AND TRUE = (" * 64 + "a + 1 * 2 = 2" + ")" * 64,
    "both sides": "(" * 64 + "a = 1" + " OR b = 1 AND c = 1) = TRUE" * 64,
    "arithmetic": "a < " + "1 + 2 * (" * 64 + "1" + ")" * 64,
}


@pytest.mark.parametrize("name", LEVELS)
def test_the_deepest_expression_leaves_room_on_the_stack(name: str) -> None:
    def compile_and_call() -> None:
        predicate = plugin(text_bytes_max=16_384, nodes_max=1024).compile(LEVELS[name])
        assert predicate(record(a="1", b="2", c="3")) in (True, False)

    deep(200, compile_and_call)


class CountingText(str):
    """A text that counts its searches."""

    searches = 0

    def find(self, *args: Any) -> int:
        type(self).searches += 1
        return str.find(self, *args)

    def startswith(self, *args: Any) -> bool:
        type(self).searches += 1
        return str.startswith(self, *args)


@pytest.mark.parametrize(
    ("pattern", "text", "verdict", "searches"),
    [
        ("%" + "a%" * 2000 + "b", "a" * 30_000, False, 2),
        ("%a" * 2000, "a" * 30_000, True, 4100),
        ("%" * 4000, "a" * 30_000, True, 10),
        ("%" + "_" * 1000 + "%b%", "a" * 30_000, False, 10),
        ("%a_b%", "a" * 30_000, None, 4 * STEPS_MAX),
        ("%" + "a_" * 1000 + "b%", "a" * 30_000, None, 4 * STEPS_MAX),
        ("%" + "aa_" * 10 + "%" + "ab_" * 10 + "%", "a" * 30_000, False, 50),
    ],
    ids=lambda value: str(value)[:12],
)
def test_no_pattern_searches_a_text_often(pattern: str, text: str, verdict: bool | None, searches: int) -> None:
    CountingText.searches = 0
    assert compile_like(pattern, "")(CountingText(text), [STEPS_MAX]) is verdict
    assert is_slow(pattern, "") or verdict is not None
    assert CountingText.searches <= searches


def test_all_patterns_of_an_expression_share_their_steps() -> None:
    slow = " OR ".join(["a LIKE '%x_b%'"] * 60)
    condition = plugin().compile(slow)
    assert condition.steps == [0]
    for times in (1, 2):
        assert condition(record(a="x" * 30_000)) is False
        assert condition.steps is not None
        assert STEPS_MAX * times <= condition.steps[0] < (STEPS_MAX + 200) * times
    assert condition(record(a="yxxb")) is True
    assert condition(record(a="yxxb", b="7")) is True
    assert condition.cost > 20
    assert plugin().compile("a = 7").cost == 1


async def test_a_selection_is_compiled_once_until_the_filters_change() -> None:
    async with broker_in_memory() as broker:
        with pytest.raises(Refused, match="filter language 'SQL92' is not installed"):
            broker.selection("SQL92", "a = 1")
        broker.filters = dict(plugin().martlet_filters(broker))
        first = broker.selection("SQL92", "a = 1")
        assert broker.selection("SQL92", "a = 1") is first
        broker.filters = {}  # as when a plugin is stopped
        with pytest.raises(Refused, match="filter language 'SQL92' is not installed"):
            broker.selection("SQL92", "a = 1")


async def test_a_predicate_runs_in_several_threads_at_once() -> None:
    predicate = plugin().compile("a LIKE '%x_z%' AND b > 5 AND b < 10")
    verdicts: list[list[bool]] = []
    together = threading.Barrier(4)

    def run() -> None:
        together.wait()
        verdicts.append([predicate(record(a=f"__xy{c}__", b=str(n))) for n in range(200) for c in "zy"])

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(trio.to_thread.run_sync, run)
    assert verdicts == [[c == "z" and 5 < n < 10 for n in range(200) for c in "zy"]] * 4
