"""What expressions select, for any protocol, and how many compiled ones are cached."""

import pytest
from tests.delivery.pushing import broker_in_memory, publish, subscribe

from martlet.broker import Broker
from martlet.contracts import Condition, Predicate
from martlet.delivery.routing.selection import CACHED_CHARS_MAX, CACHED_MAX, EVERYTHING, Selection, select_tags
from martlet.delivery.subscriptions import from_earliest
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.records.codec import encode_record, tags_code
from martlet.records.layout import RecordView

assert tags_code("Aa") == tags_code("BB")  # two tags with one hash


def compile_prefix(expression: str) -> Predicate:
    if not expression:
        raise Refused(Reason.ILLEGAL, "prefix is empty; name one")

    def begins(record: RecordView) -> bool:
        return bytes(record.body).startswith(expression.encode())

    return begins


async def selected(broker: Broker, selection: Selection) -> list[str]:
    """The bodies that a subscriber with *selection* gets."""
    came = await subscribe(broker, "t", selection=selection, start=from_earliest).drain()
    return [line.split(":")[2] for line in came]


async def test_tags_select_exactly_and_by_their_hash_where_that_is_wanted() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        for tag in ("Aa", "BB", "C"):
            publish(broker, "t", 0, tag.encode(), properties=f"TAGS\x01{tag}\x02".encode())
        publish(broker, "t", 0, b"none")
        assert await selected(broker, broker.selection("TAG", "Aa || C")) == ["Aa", "C"]
        assert await selected(broker, broker.selection("TAG", "Aa", exact=False)) == ["Aa", "BB"]
        assert broker.selection("TAG", "*") is EVERYTHING
        assert broker.selection("TAG", "") is EVERYTHING


async def test_a_language_selects_by_its_predicate_alone_and_with_tags() -> None:
    async with broker_in_memory() as broker:
        broker.filters["PREFIX"] = compile_prefix
        broker.topics.ensure("t", 1)
        for tag, body in (("A", b"xa"), ("B", b"xb"), ("A", b"ya")):
            publish(broker, "t", 0, body, properties=f"TAGS\x01{tag}\x02".encode())
        wanted = broker.selection("PREFIX", "x")
        assert await selected(broker, wanted) == ["xa", "xb"]
        tagged = select_tags(("A",))
        for both in (tagged.both(wanted), wanted.both(tagged)):
            assert both.codes == frozenset((tags_code("A"),))
            assert await selected(broker, both) == ["xa"]
        assert wanted.both(EVERYTHING) is wanted
        assert EVERYTHING.both(wanted) is wanted
        assert await selected(broker, tagged.both(select_tags(("B",)))) == []


async def test_two_conditions_together_cost_both_and_search_for_one() -> None:
    def find(data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
        return None

    steps = [0]
    slow = Selection("slow", None, Condition(lambda record: record.queue_id > 1, 5, steps=steps))
    quick = Selection("quick", None, Condition(lambda record: record.queue_id < 3, 2, find))
    plain = Selection("plain", None, lambda record: record.queue_offset == 0)
    for both in (slow.both(quick), quick.both(slow), slow.both(plain).both(quick)):
        assert isinstance(both.predicate, Condition)
        assert (both.predicate.cost, both.predicate.find, both.predicate.steps) == (7, find, steps)
        views = [RecordView(encode_record(Message("t", b""), queue, 0, 0, 0, bytes(8))) for queue in range(5)]
        assert [queue for queue, view in enumerate(views) if both.predicate(view)] == [2]
    assert not isinstance(select_tags(("A",)).both(plain).predicate, Condition)


async def test_selections_are_kept_up_to_a_bound_and_long_ones_are_not() -> None:
    async with broker_in_memory() as broker:
        first = broker.selection("TAG", "a || b")
        assert broker.selection("TAG", "a || b") is first
        assert broker.selection("TAG", "a || b", exact=False) is not first
        long = "x" * (CACHED_CHARS_MAX + 1)
        assert broker.selection("TAG", long) is not broker.selection("TAG", long)
        for number in range(2 * CACHED_MAX):
            broker.selection("TAG", str(number))
            assert len(broker._selections._cached) <= CACHED_MAX


@pytest.mark.parametrize(
    ("language", "expression", "reason"),
    [
        ("TAG", "||", Reason.ILLEGAL),
        ("TAG", "x" * 20_000, Reason.ILLEGAL),
        ("PREFIX", "", Reason.ILLEGAL),
        ("SQL92", "a = 1", Reason.NOT_SUPPORTED),
    ],
)
async def test_an_invalid_expression_is_refused_each_time(language: str, expression: str, reason: Reason) -> None:
    async with broker_in_memory() as broker:
        broker.filters["PREFIX"] = compile_prefix
        for _ in range(2):
            with pytest.raises(Refused) as refused:
                broker.selection(language, expression)
            assert refused.value.reason is reason
