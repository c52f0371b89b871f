"""Unsent output: what is held, what is ready, and what may not leave in plain text."""

import pytest

from martlet.contracts import Buffer
from martlet.errors import Reason, Refused
from martlet.net.output import Answers, Output
from martlet.net.peer import ServerPeer
from martlet.net.pending import PendingWork

FULL = Refused(Reason.UNAVAILABLE, "the disk is full")


def answers(*pieces: Buffer, holds: list[tuple[int, int]] | None = None) -> Answers:
    return Answers(
        [*pieces], sum(map(len, pieces)), max((position for _, position in holds or ()), default=0), holds or []
    )


def test_an_answer_leaves_after_those_that_are_held_before_it() -> None:
    output = Output(PendingWork(), blocked=False)
    output.hold(answers(b"a"), 5)
    output.add(answers(b"b"))
    output.hold(answers(b"c"), 7)
    output.add(answers(b"d"))
    assert (output.ready, output.held_position, output.held_bytes) == ([], 5, 4)
    assert not output.release(6)
    assert (output.ready, output.held_position, output.held_bytes) == ([b"a", b"b"], 7, 2)
    assert output.release(7)
    assert output.ready == [b"a", b"b", b"c", b"d"]
    assert (output.held_position, output.held_bytes, output.unsent_bytes) == (-1, 0, 4)


def test_what_was_sent_of_a_piece_is_not_sent_again() -> None:
    pending = PendingWork[ServerPeer]()
    output = Output(pending, blocked=False)
    output.add(answers(b"abc", b"de"))
    output.drop_sent(1)
    assert b"".join(output.unsent()) == b"bcde"
    assert pending.unsent_bytes == 5
    output.drop_sent(3)
    assert b"".join(output.unsent()) == b"e"
    assert pending.unsent_bytes == 2
    output.drop_sent(1)
    assert output.is_empty
    assert pending.unsent_bytes == 0


@pytest.mark.parametrize("drops_rest", [False, True])
def test_what_follows_the_border_leaves_only_after_tls_has_begun(drops_rest: bool) -> None:
    pending = PendingWork[ServerPeer]()
    output = Output(pending, blocked=False)
    border = output.begin_border(drops_rest=drops_rest)
    output.add(answers(b"plain", border, b"secret"))
    assert output.ready == [b"plain"]
    assert pending.unsent_bytes == len(b"plain") + (0 if drops_rest else len(b"secret"))
    if not drops_rest:
        output.drop_sent(5)
        assert output.is_at_border
        output.unblock()
        assert output.ready == [b"secret"]


def test_what_the_client_never_asked_for_by_tls_is_dropped_at_the_border() -> None:
    pending = PendingWork[ServerPeer]()
    output = Output(pending, blocked=False)
    border = output.begin_border(drops_rest=False)
    output.drop_blocked()
    output.add(answers(b"plain", border, b"secret"))
    assert output.ready == [b"plain"]
    assert pending.unsent_bytes == 5


def test_a_dropped_output_is_empty_and_blocks_nothing() -> None:
    pending = PendingWork[ServerPeer]()
    output = Output(pending, blocked=True)
    output.add(answers(b"greeting"))
    output.hold(answers(b"held"), 9)
    output.drop()
    assert output.is_empty
    assert pending.unsent_bytes == output.held_bytes == 0
    output.add(answers(b"plain"))
    assert output.ready == [b"plain"]


def test_answers_from_the_first_unwritten_one_on_are_cut() -> None:
    cut = answers(b"one", b"two", b"three", holds=[(1, 5), (2, 9)])
    cut.cut(8)
    assert (cut.pieces, cut.size, cut.hold_position, cut.holds) == ([b"one", b"two"], 6, 5, [(1, 5)])


@pytest.mark.parametrize("can_refuse", [True, False])
def test_only_answers_that_were_not_written_are_refused(can_refuse: bool) -> None:
    refused = answers(b"one", b"two", b"three", holds=[(1, 5), (2, 9)])
    assert refused.refuse(8, FULL, lambda answer, error: b"no " + answer if can_refuse else None) is can_refuse
    assert refused.pieces == [b"one", b"two", b"no three" if can_refuse else b"three"]
    if can_refuse:
        assert (refused.size, refused.hold_position) == (14, 8)
