"""How many messages the queues of a topic had before a position in the log, and how that is stored with a session."""

from random import Random

import pytest
from tests.delivery.pushing import broker_in_memory
from tests.delivery.test_cursor import send, settle
from tests.sessions.session_talk import said

from martlet.runtime.steps import finish_now
from martlet.sessions.journal_codec import WHOLE, SessionState, decode_note, encode_note, encode_whole
from martlet.sessions.missed_messages import ENTRIES_AT_ONCE
from martlet.sessions.state import SessionTable

COUNT = 5 * ENTRIES_AT_ONCE


@pytest.mark.parametrize("is_saved", [False, True])
async def test_messages_before_any_position_are_counted(is_saved: bool) -> None:
    """In files and in memory, for positions close together and far apart."""
    random = Random(1)
    async with broker_in_memory(flush="async", segment_bytes=1 << 20) as broker:
        broker.topics.ensure("t", 3)
        broker.topics.ensure("other", 1)
        sent: list[int] = []
        for number in range(COUNT):
            if number == COUNT - 200:
                await settle(broker)
                await broker.store.upkeep.checkpointer.checkpoint()
            sent.append(send(broker, "n", "", random.choice((0, 0, 0, 0, 1)), "t"))
            send(broker, "n", "", 0, "other")
        if is_saved:
            await settle(broker)
            await broker.store.upkeep.checkpointer.checkpoint()
        missed = broker.sessions.missed
        for positions in (
            [0],
            [broker.store.appended],
            sorted(each + more for each in sent for more in (0, 1)),
            sorted(random.sample(range(broker.store.appended), 10)),
        ):
            counts = finish_now(missed._count_before("t", positions))
            assert counts == {position: sum(each < position for each in sent) for position in positions}
        assert finish_now(missed._count_before("no such topic", [7])) == {7: 0}


def a_state() -> SessionState:
    state = SessionState("toy me", "owner", 100, 60)
    state._add_filter("a/#", b"1")
    state.flight[1] = 90
    return state


@pytest.mark.parametrize("ends_ms", [0, 1000])
def test_what_a_session_has_passed_is_stored_with_it_until_it_moves(ends_ms: int) -> None:
    state = a_state()
    state.ends_ms = ends_ms
    table = SessionTable("t")
    for passed in ({}, {"mqtt": 7, "bees": 1 << 40}):  # first as a new session, then as a known one
        state.passed = passed
        for note in encode_whole(state, 1 << 16):
            table._apply(*decode_note(note), 200)
        assert table.position("toy me") == (100, bool(passed))
    again = SessionTable("t")
    finish_now(again.restore(b"".join(finish_now(table.freeze())), 0))
    for each in (table, again):
        found = each.get("toy me")
        assert found is not None
        assert found.passed == state.passed
        assert said(found) == said(state)
    assert again.floor() == 0
    state._move(100)
    assert state.passed
    state._move(101)
    assert not state.passed


def test_a_note_of_an_older_version_is_read() -> None:
    state = a_state()
    fields = [1000, "owner", 100, 60, 1, b"", {"a/#": b"1"}, [1, 90]]
    table = SessionTable("t")
    for _ in range(2):
        table._apply(*decode_note(encode_note(WHOLE, "toy me", 0, *fields)), 5)
        assert said(table.get("toy me")) == said(state)
        assert table.position("toy me") == (100, False)
    assert encode_whole(state, 1 << 16)[0] == encode_note(WHOLE, "toy me", 0, 0, *fields[1:])
