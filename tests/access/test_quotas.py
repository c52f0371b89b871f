"""Quotas of users and groups: who shares what, and what stays after a connection."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from martlet.access import UNLIMITED, Allowance, Quotas
from martlet.access.allowances import RECEIVE_FIRST, RECEIVE_LEAST, RECEIVE_MOST
from martlet.access.quotas import IDENTITIES_MAX, NAMES_MAX
from martlet.contracts import Identity, Quota
from martlet.errors import Reason, Refused
from martlet.testing.peers import RecordingPace, RecordingPeer

ANN, BOB, NOBODY = Identity("ann"), Identity("bob"), Identity()
GROUP: Final = "staff"


class Table:
    """Quotas by user name, as a plugin would have them."""

    def __init__(self, **quotas: Sequence[Quota]) -> None:
        self.of: Mapping[str, Sequence[Quota]] = quotas
        self.asked: list[str] = []
        self.fails = False
        self.quotas = Quotas()
        self.quotas.sources = (self.answer,)

    def answer(self, identity: Identity) -> Sequence[Quota]:
        self.asked.append(identity.name)
        if self.fails:
            raise Refused(Reason.UNAVAILABLE, "no table")
        return self.of.get(identity.name, ())

    def connect(self, identity: Identity = ANN) -> tuple[Allowance, RecordingPeer]:
        peer = RecordingPeer()
        return self.quotas.admit(identity, peer), peer

    def statistic(self, name: str) -> object:
        return self.quotas.statistics()[name]


def end(peer: RecordingPeer) -> None:
    for tell in peer.paced.tells:
        tell()


def refused(check: Callable[[], object]) -> str:
    with pytest.raises(Refused) as caught:
        check()
    assert caught.value.reason is Reason.QUOTA
    return str(caught.value)


async def test_without_sources_nothing_is_counted_or_slowed(mock_clock: MockClock) -> None:
    quotas, peer = Quotas(), RecordingPeer()
    allowance = quotas.admit(ANN, peer)
    assert allowance is UNLIMITED
    assert not allowance.applies
    assert allowance.room(7, 8) == (7, 8)
    allowance.check_in()
    allowance.check_out()
    allowance.charge_in(1000, 1 << 40)
    allowance.charge_out(1000, 1 << 40)
    allowance.check_subscriptions(1000)
    allowance.note_subscriptions(1000)
    allowance.join_group("g")()
    assert not allowance.must_wait
    assert not allowance.refuse_excess([1] * 1000)
    assert peer.paced.tells == []
    assert quotas.statistics()["identities"] == 0


async def test_a_client_that_sends_too_much_is_read_later(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10)])
    allowance, peer = table.connect()
    allowance.charge_in(9, 90)
    assert peer.paced.read_at == 0
    allowance.charge_in(6, 60)
    assert peer.paced.read_at - trio.current_time() == pytest.approx(0.6, abs=1e-4)
    allowance.charge_in(5, 50)
    assert peer.paced.read_at - trio.current_time() == pytest.approx(1.1, abs=1e-4)
    assert table.statistic("slowed_ms") == pytest.approx(1100, abs=1)
    assert table.statistic("slowed_ms_by_name") == {"user 'ann'": pytest.approx(1100, abs=1)}
    assert peer.paced.deliver_at == 0, "its deliveries are another rate"


async def test_what_is_left_least_decides(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=1000, bytes_in=100), Quota(GROUP, messages_in=10)])
    allowance, peer = table.connect()
    allowance.charge_in(10, 50)
    assert peer.paced.read_at - trio.current_time() == pytest.approx(0.1, abs=1e-4)
    allowance.charge_in(1, 550)
    assert peer.paced.read_at - trio.current_time() == pytest.approx(5.0, abs=0.02)
    by_name = table.statistic("slowed_ms_by_name")
    assert by_name == {"user 'ann'": pytest.approx(4900, abs=20), "group 'staff'": pytest.approx(100, abs=1)}


async def test_the_connections_of_a_user_share_its_quota_and_take_turns(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10)])
    (first, one), (second, two) = table.connect(), table.connect()
    got = [0, 0]
    first.charge_in(10, 10)
    for _ in range(200):  # both always have more, five messages at once
        allowance, peer, number = (first, one, 0) if one.paced.read_at <= two.paced.read_at else (second, two, 1)
        mock_clock.jump(max(peer.paced.read_at - trio.current_time(), 0))
        allowance.charge_in(5, 5)
        got[number] += 5
    assert got == [500, 500]
    assert sum(got) == pytest.approx(10 * trio.current_time(), rel=0.03)


async def test_the_members_of_a_group_share_its_quota(mock_clock: MockClock) -> None:
    shared = Quota(GROUP, messages_in=10, messages_out=10)
    table = Table(ann=[shared], bob=[shared], eve=[])
    (ann, _), (bob, of_bob), (eve, of_eve) = table.connect(), table.connect(BOB), table.connect(Identity("eve"))
    ann.charge_in(50, 50)
    bob.charge_in(1, 1)
    eve.charge_in(1, 1)
    assert of_bob.paced.read_at - trio.current_time() == pytest.approx(4.2, abs=1e-3)
    assert of_eve.paced.read_at == 0
    assert table.statistic("quotas") == 1


async def test_two_users_with_equal_quotas_of_their_own_share_nothing(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10)], bob=[Quota(messages_in=10)])
    (ann, _), (bob, of_bob) = table.connect(), table.connect(BOB)
    ann.charge_in(50, 50)
    bob.charge_in(1, 1)
    assert of_bob.paced.read_at == 0


async def test_connecting_again_does_not_help(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10)])
    allowance, peer = table.connect()
    allowance.charge_in(100, 100)
    end(peer)
    assert table.statistic("identities") == 0
    assert table.statistic("quotas") == 1, "it stays until everything is paid for"
    for _ in range(3):
        again, peer = table.connect()
        assert peer.paced.read_at == pytest.approx(9.1, abs=1e-3), "a new connection is not read before"
        end(peer)
    mock_clock.jump(9.5)
    again, peer = table.connect()
    assert peer.paced.read_at == 0
    assert again.refuse_excess([1] * 9) == {}
    again.charge_in(6, 6)
    assert peer.paced.read_at - trio.current_time() == pytest.approx(0.2, abs=1e-3), "five had been paid for"


async def test_connecting_again_does_not_help_who_is_refused(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10, refuses=True)])
    allowance, peer = table.connect()
    allowance.charge_in(10, 10)
    end(peer)
    again, peer = table.connect()
    assert peer.paced.read_at == 0
    refused(again.check_in)


async def test_pools_without_connections_are_dropped_once_they_are_paid_for(mock_clock: MockClock) -> None:
    table = Table(**{f"user-{number}": [Quota(messages_in=10)] for number in range(100)})
    for number in range(100):
        allowance, peer = table.connect(Identity(f"user-{number}"))
        allowance.charge_in(20, 20)
        end(peer)
    assert table.statistic("quotas") == 100
    mock_clock.jump(3)
    for _ in range(50):
        _, peer = table.connect(NOBODY)
        end(peer)
    assert table.statistic("quotas") == 0


async def test_a_pool_that_is_paid_for_ends_with_its_last_connection(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(connections=10)])
    peers = [table.connect()[1] for _ in range(2)]
    assert table.statistic("quotas") == 1
    end(peers[0])
    assert table.statistic("quotas") == 1
    end(peers[1])
    assert table.statistic("quotas") == 0


# refusals


async def test_what_refuses_slows_nobody_and_accepts_what_is_left(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10, refuses=True)])
    allowance, peer = table.connect()
    assert sorted(allowance.refuse_excess([1] * 12)) == [10, 11]
    allowance.charge_in(10, 10)
    assert peer.paced.read_at == 0
    text = refused(allowance.check_in)
    assert text == "user 'ann': may send 10 messages a second, and that is used up; try again later"
    assert sorted(allowance.refuse_excess([1] * 3)) == [0, 1, 2]
    assert table.statistic("refused") == 6
    assert table.statistic("refused_by_name") == {"user 'ann'": 6}


async def test_a_refused_client_may_go_on_as_its_quota_fills(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10, messages_out=10, refuses=True)])
    allowance, _ = table.connect()
    allowance.charge_in(10, 10)
    allowance.charge_out(10, 10)
    mock_clock.jump(0.31)
    assert sorted(allowance.refuse_excess([1] * 5)) == [3, 4]
    allowance.check_in()
    allowance.check_out()


async def test_one_quota_may_slow_and_another_refuse(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10), Quota(GROUP, messages_in=20, refuses=True)])
    allowance, peer = table.connect()
    allowance.charge_in(15, 15)
    assert peer.paced.read_at > 0
    allowance.check_in()
    allowance.charge_in(5, 5)
    assert refused(allowance.check_in).startswith("group 'staff'")


# deliveries


async def test_deliveries_get_what_is_left_and_then_wait(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_out=10, bytes_out=1000)])
    allowance, peer = table.connect()
    assert allowance.room(100, 10_000) == (10, 1000)
    assert allowance.room(3, 50) == (3, 50)
    allowance.charge_out(10, 100)
    assert peer.paced.deliver_at - trio.current_time() == pytest.approx(0.1, abs=1e-4)
    assert [allowance.must_wait, *allowance.room(100, 10_000)] == [True, 0, 0]
    mock_clock.jump(0.11)
    assert [allowance.must_wait] == [False]
    messages, size = allowance.room(100, 10_000)
    assert messages == 2, "a quarter of a second's worth comes at once"
    assert size >= 900
    assert peer.paced.read_at == 0


async def test_deliveries_of_two_connections_take_turns(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_out=100)])
    (first, one), (second, two) = table.connect(), table.connect()
    got = [0, 0]
    for _ in range(400):
        moved = False
        for number, (allowance, peer) in enumerate([(first, one), (second, two)]):
            if peer.paced.deliver_at > trio.current_time():
                continue
            messages, _ = allowance.room(1000, 1 << 20)
            if messages:
                allowance.charge_out(messages, messages)
                got[number] += messages
                moved = True
        if not moved:
            mock_clock.jump(min(one.paced.deliver_at, two.paced.deliver_at) - trio.current_time() + 1e-5)
    assert min(got) > 1000
    assert abs(got[0] - got[1]) <= 100
    assert sum(got) == pytest.approx(100 * (trio.current_time() + 1), rel=0.03)


async def test_a_connection_whose_turn_has_come_is_not_overtaken(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_out=10)])
    (first, _), (second, two) = table.connect(), table.connect()
    first.charge_out(20, 20)
    assert second.room(5, 5) == (0, 0)
    mock_clock.jump(two.paced.deliver_at - trio.current_time())
    assert first.room(5, 500)[0] == 2
    first.charge_out(5, 5)
    assert second.room(5, 500)[0] == 2, "others went first, and it still has its turn"
    second.charge_out(2, 2)
    assert second.room(5, 500) == (0, 0)


async def test_pushed_deliveries_wait_even_if_the_quota_refuses(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_out=10, refuses=True)])
    allowance, peer = table.connect()
    allowance.charge_out(20, 20)
    assert peer.paced.deliver_at > trio.current_time()
    assert allowance.room(5, 5) == (0, 0)
    assert refused(allowance.check_out).startswith("user 'ann': may receive 10 messages")


# what is read at once


async def test_a_limited_connection_is_read_in_pieces_of_a_quarter_of_a_second(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=100)], bob=[Quota(bytes_in=1 << 30)])
    allowance, peer = table.connect()
    assert peer.paced.receive_bytes == max(25 * 256, RECEIVE_FIRST)
    allowance.charge_in(1, 1000)
    assert peer.paced.receive_bytes == 25_000
    allowance.charge_in(1, 1)
    assert peer.paced.receive_bytes == RECEIVE_LEAST
    allowance.charge_in(1, 1 << 20)
    assert peer.paced.receive_bytes == RECEIVE_MOST
    _, peer = table.connect(BOB)
    assert peer.paced.receive_bytes == RECEIVE_MOST


# what is open


async def test_connections_are_counted_by_user_and_by_group(mock_clock: MockClock) -> None:
    group = Quota(GROUP, connections=3)
    table = Table(ann=[Quota(connections=2), group], bob=[group])
    first, second = table.connect()[1], table.connect()[1]
    assert refused(table.connect) == "user 'ann': 2 connections are open, and the quota is 2"
    table.connect(BOB)
    assert refused(lambda: table.connect(BOB)) == "group 'staff': 3 connections are open, and the quota is 3"
    end(first)
    table.connect(BOB)
    end(second)
    table.connect()


async def test_a_refused_connection_leaves_nothing(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(GROUP, connections=1)], bob=[Quota(GROUP, connections=1)])
    _, peer = table.connect()
    for _ in range(3):
        refused(lambda: table.connect(BOB))
    end(peer)
    assert table.statistic("identities") == 0
    assert table.statistic("quotas") == 0


async def test_several_gates_of_a_connection_count_once(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(connections=1)])
    allowance, peer = table.connect()
    assert table.quotas.admit(ANN, peer) is allowance
    assert table.asked == ["ann"]


async def test_a_connection_may_act_for_many_identities_and_counts_for_the_last_ones(mock_clock: MockClock) -> None:
    table = Table(**{f"user-{number}": [Quota(connections=1)] for number in range(100)})
    peer = RecordingPeer()
    for number in range(100):
        table.quotas.admit(Identity(f"user-{number}"), peer)
    assert table.statistic("identities") == IDENTITIES_MAX
    assert len(peer.paced.tells) == 1
    table.connect(Identity("user-0"))
    refused(lambda: table.connect(Identity("user-99")))
    end(peer)
    assert table.statistic("identities") == 1


async def test_subscriptions_are_those_that_each_connection_has_now(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(subscriptions=5)])
    (first, one), (second, _) = table.connect(), table.connect()
    first.note_subscriptions(3)
    second.check_subscriptions(2)
    second.note_subscriptions(2)
    assert "5 subscriptions are open and 1 requested, and the quota is 5" in refused(first.check_subscriptions)
    first.note_subscriptions(1)
    second.check_subscriptions(2)
    end(one)
    second.check_subscriptions(3)
    assert second.subscriptions == 2


async def test_shared_groups_are_counted_once_however_many_members_they_have(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(shared_groups=2)])
    (first, one), (second, _) = table.connect(), table.connect()
    leave_first, leave_second = first.join_group("a"), second.join_group("a")
    leave_b = first.join_group("b")
    assert "2 shared groups are in use, and the quota is 2" in refused(lambda: second.join_group("c"))
    leave_first()
    refused(lambda: second.join_group("c"))
    leave_second()
    second.join_group("c")
    end(one)
    refused(lambda: second.join_group("d"))
    leave_b()  # its member left after the connection
    second.join_group("d")


async def test_a_group_that_is_left_last_ends_the_account(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(shared_groups=2)])
    allowance, peer = table.connect()
    leave = allowance.join_group("a")
    end(peer)
    assert table.statistic("identities") == 1
    leave()
    assert table.statistic("identities") == 0
    assert table.statistic("quotas") == 0


async def test_noted_groups_replace_those_before_or_change_nothing(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(shared_groups=3)])
    (first, one), (second, _) = table.connect(), table.connect()
    first.note_groups(["a", "b"])
    second.note_groups(["b", "c"])
    assert "shared groups" in refused(lambda: first.note_groups(["a", "d", "e"]))
    assert "shared groups" in refused(lambda: second.note_groups(["b", "c", "d"]))
    first.note_groups(["b"])
    second.note_groups(["b", "c", "d"])
    end(one)
    second.note_groups(["x", "y", "z"])


# changes


async def test_a_change_is_in_force_at_the_next_use(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10)])
    allowance, peer = table.connect()
    allowance.charge_in(5, 5)
    table.of = {"ann": [Quota(messages_in=1000)]}
    table.quotas.changed()
    allowance.charge_in(300, 300)
    assert peer.paced.read_at == 0
    table.of = {"ann": [Quota(messages_in=10, refuses=True)]}
    table.quotas.changed()
    allowance.charge_in(6, 6)
    refused(allowance.check_in)
    table.of = {}
    table.quotas.changed()
    allowance.check_in()
    assert table.statistic("quotas") in (0, 1)  # until it is paid for


def recheck(table: Table) -> None:
    """Do what follows a change of the rules."""
    table.quotas.changed()
    for account in table.quotas.accounts():
        for _ in account.recheck():
            pass
    assert list(table.quotas.accounts()) == []


def pauses(*peers: RecordingPeer) -> list[float]:
    """Return how long the peers are not read, and get nothing."""
    now = trio.current_time()
    return [round(max(until - now, 0), 2) for peer in peers for until in (peer.paced.read_at, peer.paced.deliver_at)]


async def test_a_raised_quota_shortens_the_pauses_of_all_who_share_it(mock_clock: MockClock) -> None:
    mock_clock.jump(1)
    group = Quota(GROUP, messages_in=10, messages_out=10)
    table = Table(ann=[group], bob=[group])
    (ann, one), (_, two), (bob, three) = table.connect(), table.connect(), table.connect(BOB)
    ann.charge_in(100, 100)
    ann.charge_out(100, 100)
    bob.charge_in(100, 100)
    assert pauses(one, two, three) == [9.1, 9.1, 0, 0, 19.1, 0]
    group = Quota(GROUP, messages_in=100, messages_out=100)
    table.of = {"ann": [group], "bob": [group]}
    recheck(table)
    assert pauses(one, two, three) == [1.01, 0.01, 0, 0, 1.01, 0]
    assert table.statistic("slowed_ms") == pytest.approx(2030, abs=1)
    bob.charge_in(100, 100)
    assert pauses(three) == [2.01, 0]
    assert ann.must_wait
    mock_clock.jump(0.02)
    assert ann.room(5, 500)[0] == 5


@pytest.mark.parametrize("after", [[], [Quota(messages_in=10, refuses=True)], [Quota(connections=1)]])
async def test_who_is_slowed_no_more_is_read_at_once(mock_clock: MockClock, after: list[Quota]) -> None:
    mock_clock.jump(1)
    table = Table(ann=[Quota(messages_in=10, bytes_out=10)])
    allowance, peer = table.connect()
    allowance.charge_in(1000, 1000)
    allowance.charge_out(1, 1000)
    assert pauses(peer) == [99.1, 99.1]
    mock_clock.jump(10)
    table.of = {"ann": after}
    recheck(table)
    assert pauses(peer) == [0, 0]
    assert table.statistic("slowed_ms") == pytest.approx(20_000, abs=1), "ten seconds in each direction"
    assert allowance.applies is bool(after)
    assert (peer.paced.receive_bytes == RECEIVE_MOST) == (after in ([], [Quota(connections=1)]))
    assert allowance.room(7, 8) == (7, 8)


async def test_a_lowered_quota_lengthens_no_pause(mock_clock: MockClock) -> None:
    mock_clock.jump(1)
    table = Table(ann=[Quota(messages_in=10)])
    allowance, peer = table.connect()
    allowance.charge_in(100, 100)
    table.of = {"ann": [Quota(messages_in=1)]}
    recheck(table)
    assert pauses(peer) == [9.1, 0]


async def test_a_connection_waits_for_each_of_its_identities(mock_clock: MockClock) -> None:
    mock_clock.jump(1)
    table = Table(ann=[Quota(messages_in=10)], bob=[Quota(messages_in=10)])
    peer = RecordingPeer()
    for identity, count in ((ANN, 100), (BOB, 50)):
        table.quotas.admit(identity, peer).charge_in(count, count)
    table.of = {"bob": [Quota(messages_in=10)]}
    recheck(table)
    assert pauses(peer) == [4.1, 0]


async def test_a_connection_that_ends_while_pauses_are_shortened_is_left_out(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(messages_in=10)])
    peers = [table.connect()[1] for _ in range(3)]
    table.quotas.changed()
    (account,) = table.quotas.accounts()
    steps = account.recheck()
    for peer in peers[1:]:
        end(peer)
    assert list(steps) == []
    assert table.statistic("identities") == 1


async def test_who_gets_a_quota_later_has_counted_before(mock_clock: MockClock) -> None:
    table = Table()
    (first, _), (second, _) = table.connect(), table.connect()
    first.note_subscriptions(3)
    second.join_group("a")
    table.of = {"ann": [Quota(connections=2, subscriptions=3, shared_groups=1)]}
    table.quotas.changed()
    assert "connections" in refused(table.connect)
    assert "subscriptions" in refused(second.check_subscriptions)
    assert "shared groups" in refused(lambda: first.join_group("b"))
    first.join_group("a")


async def test_who_leaves_a_group_of_users_counts_no_more_in_it(mock_clock: MockClock) -> None:
    group = Quota(GROUP, connections=2, subscriptions=2, shared_groups=1)
    table = Table(ann=[group], bob=[group])
    (ann, _), (bob, _) = table.connect(), table.connect(BOB)
    ann.note_subscriptions(2)
    ann.join_group("a")
    table.of = {"bob": [group]}
    recheck(table)
    bob.check_subscriptions(2)
    bob.join_group("b")
    table.connect(BOB)


async def test_a_plugin_that_fails_refuses_new_clients_and_changes_nothing_for_others(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(connections=2, messages_in=10, refuses=True)])
    allowance, _ = table.connect()
    table.fails = True
    table.quotas.changed()
    allowance.charge_in(10, 10)
    refused(allowance.check_in)
    table.connect()  # the user is known, with the quotas from before
    with pytest.raises(Refused, match="no table"):
        table.connect(BOB)
    assert table.statistic("identities") == 1
    assert table.asked.count("ann") == 2, "it is not asked again for each message"


async def test_the_names_in_the_statistics_are_bounded(mock_clock: MockClock) -> None:
    many = {f"user-{number:03d}" * 30: [Quota(connections=1)] for number in range(NAMES_MAX + 20)}
    table = Table(**many)
    for name in many:
        table.connect(Identity(name))
        refused(lambda name=name: table.connect(Identity(name)))  # type: ignore[misc]
    by_name = table.statistic("refused_by_name")
    assert isinstance(by_name, dict)
    assert len(by_name) == NAMES_MAX + 1
    assert by_name["others"] == 20
    assert max(map(len, by_name)) < 100
    assert table.statistic("refused") == NAMES_MAX + 20


async def test_clients_without_a_name_have_a_quota_together(mock_clock: MockClock) -> None:
    table = Table()
    table.of = {"": [Quota(connections=1)]}
    table.connect(NOBODY)
    assert refused(lambda: table.connect(NOBODY)).startswith("clients without a name: 1 connections are open")
    table.connect()


class EndedPace(RecordingPace):
    """The pace of a connection that has ended."""

    def on_end(self, tell: Callable[[], None]) -> None:
        tell()


async def test_a_connection_that_has_closed_already_is_not_counted(mock_clock: MockClock) -> None:
    table = Table(ann=[Quota(connections=1)])
    assert not table.quotas.admit(ANN, RecordingPeer(paced=EndedPace())).applies
    assert table.statistic("identities") == 0
