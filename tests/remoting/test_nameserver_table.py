"""The route table: who is registered, for how long, and what routes say of it."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from martlet.errors import Reason, Refused
from martlet.runtime.steps import Steps, finish_now
from martlet_remoting.nameserver.live import BROKERS_OF_A_CONNECTION_MAX
from martlet_remoting.nameserver.table import (
    UNIT,
    UNIT_SUB,
    Registered,
    RouteTable,
)
from martlet_remoting.wire.register_broker import Registration
from martlet_remoting.wire.routes import TopicQueues, TopicShape, Version

V1 = Version(1, 0, 1000)
V2 = Version(2, 0, 2000)


def shapes(*names: str, queues: int = 4, perm: int = 6) -> tuple[TopicShape, ...]:
    return tuple(TopicShape(name, queues, queues, perm) for name in names)


def broker(
    name: str = "a",
    number: int = 0,
    topics: tuple[TopicShape, ...] = shapes("T", "U"),
    version: Version = V1,
    address: str = "",
    cluster: str = "c",
    acting: bool | None = None,
    timeout_ms: int | None = None,
    complete: bool = False,
) -> Registration:
    return Registration(
        cluster,
        name,
        number,
        address or f"{name}:{number}",
        ha_address=f"ha-{name}:{number}",
        timeout_ms=timeout_ms,
        acting_master=acting,
        version=version,
        topics=topics,
        complete=complete,
    )


def register(table: RouteTable, new: Registration, now: float, connection: object = None) -> Registered:
    return finish_now(table.register(new, now, connection))


def brokers_of(table: RouteTable, topic: str) -> list[str]:
    route = table.route(topic)
    return [] if route is None else [entry.broker_name for entry in route.queues]


def test_registered_topic_has_a_route_with_all_its_brokers() -> None:
    table = RouteTable()
    register(table, broker("a"), 0.0)
    register(table, broker("b", topics=shapes("T", "V")), 0.0)
    route = table.route("T")
    assert route is not None
    assert route.queues == (TopicQueues("a", 4, 4, 6), TopicQueues("b", 4, 4, 6))
    assert [(group.name, group.addresses) for group in route.brokers.values()] == [("a", {0: "a:0"}), ("b", {0: "b:0"})]
    assert brokers_of(table, "V") == ["b"]
    assert table.route("nowhere") is None


def test_single_topic_from_an_unknown_broker_is_refused_and_leaves_no_trace() -> None:
    table = RouteTable()
    with pytest.raises(Refused, match="register broker failed") as error:
        register(table, broker(topics=shapes("T")), 0.0)
    assert error.value.reason is Reason.NOT_SUPPORTED
    assert table.clusters() == {}
    assert finish_now(table.index.names()) == []
    register(table, broker(topics=shapes("T"), complete=True), 0.0)
    assert finish_now(table.index.names()) == ["T"]


def test_a_known_broker_may_register_one_changed_topic() -> None:
    table = RouteTable()
    register(table, broker(), 0.0)
    register(table, broker(topics=shapes("T", queues=9), version=V2), 1.0)
    route = table.route("T")
    assert route is not None
    assert route.queues == (TopicQueues("a", 9, 9, 6),)
    assert finish_now(table.index.names()) == ["T", "U"]


def test_same_version_changes_nothing_but_adds_unknown_topics() -> None:
    table = RouteTable()
    register(table, broker(), 0.0)
    finish_now(table.wipe_write("a"))
    register(table, broker(topics=shapes("T", "U", "W")), 1.0)
    perms = {topic: route.queues[0].perm for topic in finish_now(table.index.names()) if (route := table.route(topic))}
    assert perms == {"T": 4, "U": 4, "W": 6}


def test_complete_registration_takes_missing_topics_away() -> None:
    table = RouteTable()
    register(table, broker(), 0.0)
    register(table, broker("b"), 0.0)
    register(table, broker(topics=shapes("U"), version=V2, complete=True), 1.0)
    assert brokers_of(table, "T") == ["b"]
    assert brokers_of(table, "U") == ["a", "b"]


def test_missing_topics_linger_unless_configured_otherwise() -> None:
    for drop, left in ((False, ["T", "U", "W"]), (True, ["U", "W"])):
        table = RouteTable(drop_missing_topics=drop)
        register(table, broker(), 0.0)
        register(table, broker(topics=shapes("U", "W"), version=V2), 1.0)
        assert sorted(finish_now(table.index.names())) == left


def test_silent_broker_expires_after_its_own_time_and_takes_its_topics() -> None:
    table = RouteTable()
    register(table, broker("a", timeout_ms=10_000), 0.0, "line a")
    register(table, broker("b", topics=shapes("T", "V")), 0.0, "line b")
    assert table.expire(10.0) == []
    assert table.expire(10.1) == ["line a"]
    assert finish_now(table.index.names()) == ["T", "V"]
    table.live.heard("c", "b:0", 100.0)
    assert table.expire(200.0) == []
    assert table.expire(220.1) == ["line b"]
    assert (finish_now(table.index.names()), table.clusters(), table.groups()) == ([], {}, [])


def test_closed_connection_drops_its_brokers_only() -> None:
    table = RouteTable()
    register(table, broker("a"), 0.0, 1)
    register(table, broker("a"), 0.0, 2)
    register(table, broker("b"), 0.0, 3)
    table.drop_connection(1)
    assert brokers_of(table, "T") == ["a", "b"]
    table.drop_connection(2)
    assert brokers_of(table, "T") == ["b"]


def test_slave_learns_its_master_and_contributes_its_address_only() -> None:
    table = RouteTable()
    register(table, broker(), 0.0)
    answer = register(table, broker(number=1, topics=shapes("T", "X", queues=1), version=V2), 0.0)
    assert (answer.master_address, answer.ha_address) == ("a:0", "ha-a:0")
    assert table.group("a").addresses == {0: "a:0", 1: "a:1"}
    assert table.route("X") is None


def test_promoted_slave_keeps_one_id() -> None:
    table = RouteTable()
    register(table, broker(number=1, address="x"), 0.0)
    register(table, broker(number=0, address="x", version=V2), 1.0)
    assert table.group("a").addresses == {0: "x"}


def test_older_state_does_not_take_a_live_address_over() -> None:
    table = RouteTable()
    register(table, broker(address="new", version=Version(1, 5, 0)), 0.0)
    register(table, broker(address="old", version=Version(9, 4, 0)), 1.0)
    assert table.group("a").addresses == {0: "new"}
    register(table, broker(address="newer", version=Version(1, 6, 0)), 2.0)
    assert table.group("a").addresses == {0: "newer"}


def test_acting_master_is_read_only_and_has_id_0_if_the_client_wants_that() -> None:
    for wanted, addresses in ((False, {1: "a:1", 2: "a:2"}), (True, {0: "a:1", 2: "a:2"})):
        table = RouteTable(acting_master=wanted)
        for number in (0, 1, 2):
            register(table, broker(number=number, acting=True), 0.0)
        table.unregister("c", "a", "a:0")
        route = table.route("T")
        assert route is not None
        assert route.queues[0].perm == 4
        assert route.brokers["a"].addresses == addresses
        register(table, broker(number=0, acting=True), 1.0)
        route = table.route("T")
        assert route is not None
        assert route.queues[0].perm == 6, "the master is back"


def test_an_acting_master_registers_topics_as_read_only() -> None:
    table = RouteTable()
    register(table, broker(number=1, acting=True), 0.0)
    route = table.route("T")
    assert route is not None
    assert route.queues == (TopicQueues("a", 4, 4, 4),)
    register(table, broker(number=0, acting=True), 1.0)
    route = table.route("T")
    assert route is not None
    assert route.queues == (TopicQueues("a", 4, 4, 6),)


def test_unregister_of_a_moved_broker_keeps_the_new_address() -> None:
    table = RouteTable()
    register(table, broker(address="old"), 0.0)
    register(table, broker(address="new"), 1.0)
    table.unregister("c", "a", "old")
    assert table.group("a").addresses == {0: "new"}
    table.unregister("c", "a", "new")
    assert finish_now(table.index.names()) == []


def test_write_permission_is_wiped_and_given_back() -> None:
    table = RouteTable()
    register(table, broker(topics=shapes("T", "U", perm=7)), 0.0)
    assert finish_now(table.wipe_write("a")) == 2
    assert finish_now(table.wipe_write("nobody")) == 0
    assert table.route("T").queues[0].perm == 5  # type: ignore[union-attr]
    assert finish_now(table.add_write("a")) == 2
    assert table.route("T").queues[0].perm == 6  # type: ignore[union-attr]


def test_topic_is_deleted_everywhere_or_in_one_cluster() -> None:
    table = RouteTable()
    register(table, broker("a", cluster="c"), 0.0)
    register(table, broker("b", cluster="d"), 0.0)
    table.delete_topic("T", "d")
    assert brokers_of(table, "T") == ["a"]
    table.delete_topic("T", "nowhere")
    table.delete_topic("U")
    assert finish_now(table.index.names()) == ["T"]
    assert finish_now(table.topics_of_cluster("d")) == []


def test_topic_is_registered_on_known_brokers_only() -> None:
    table = RouteTable()
    register(table, broker("a"), 0.0)
    table.register_topic("X", [TopicQueues("a", 1, 1, 6), TopicQueues("ghost", 1, 1, 6)])
    assert brokers_of(table, "X") == ["a"]


def test_topics_are_listed_by_their_unit_flags() -> None:
    flags = {"none": 0, "unit": UNIT, "sub": UNIT_SUB, "both": UNIT | UNIT_SUB}
    table = RouteTable()
    register(table, broker(topics=tuple(TopicShape(n, 1, 1, 6, flag) for n, flag in flags.items())), 0.0)
    assert finish_now(table.index.names_by_flag(UNIT)) == ["unit", "both"]
    assert finish_now(table.index.names_by_flag(UNIT_SUB)) == ["sub", "both"]
    assert finish_now(table.index.names_by_flag(UNIT_SUB, UNIT)) == ["sub"]


def test_too_many_brokers_are_refused() -> None:
    table = RouteTable(brokers_max=2)
    register(table, broker("a"), 0.0, "line")
    register(table, broker("a", 1), 0.0)
    for new in (broker("b"), broker("a", 2)):
        with pytest.raises(Refused, match=r"nameserver\.brokers_max is 2"):
            register(table, new, 0.0)
    register(table, broker("b", address="a:0"), 0.0)
    with pytest.raises(Refused, match=r"2 names of brokers are registered; nameserver\.brokers_max is 2"):
        register(table, broker("c", address="a:0"), 0.0)
    many = RouteTable()
    for number in range(BROKERS_OF_A_CONNECTION_MAX):
        register(many, broker(f"b{number}"), 0.0, "line")
    with pytest.raises(Refused, match="registered over this connection"):
        register(many, broker("more"), 0.0, "line")
    register(many, broker("b0"), 1.0, "line")
    register(many, broker("more"), 0.0, "another line")


def test_a_full_table_keeps_the_routes_it_has_and_leaves_new_ones_out() -> None:
    table = RouteTable(topics_max=5)
    register(table, broker("a"), 0.0)
    assert register(table, broker("hostile", topics=shapes(*"VWXYZ")), 0.0).left_out == 2
    assert table.version_of("c", "hostile:0") is None, "it is to tell its topics again"
    found = register(table, broker("a", topics=shapes("T", "U", "N", queues=9), version=V2), 1.0)
    assert found.left_out == 1
    route = table.route("U")
    assert route is not None
    assert route.queues[0].read_queues == 9, "what is known is brought up to date"
    assert (brokers_of(table, "T"), brokers_of(table, "N")) == (["a"], [])
    assert table.version_of("c", "a:0") is None
    table.live.heard("c", "a:0", 100.0)
    table.expire(130.0)
    register(table, broker("late"), 130.0)
    assert brokers_of(table, "T") == ["a"], "what is gone takes room until it is swept"
    assert finish_now(table.index.sweep()) is None
    assert register(table, broker("a", topics=shapes("T", "U", "N"), version=V2), 131.0).left_out == 0
    assert table.version_of("c", "a:0") == V2


def test_mappings_of_static_topics_count_and_go_with_their_topics() -> None:
    table = RouteTable(topics_max=6)
    mapping = {"bname": "a", "currIdMap": {"0": 0, "1": 1}}
    new = replace(broker("a"), mappings={"T": mapping, "U": mapping, "ghost": mapping})
    register(table, new, 0.0)
    assert table.route("T").mappings == {"a": mapping}  # type: ignore[union-attr]
    assert table.route("U").mappings is None  # type: ignore[union-attr]
    assert table.statistics()["topics_of_all_brokers"] == 5
    table.delete_topic("T")
    assert table.statistics()["topics_of_all_brokers"] == 1


def test_many_topics_are_taken_listed_changed_and_removed_in_slices() -> None:
    table = RouteTable()
    names = tuple(f"t{number}" for number in range(3000))
    assert slices(table.register(broker("a", topics=shapes(*names)), 0.0, "line")) >= 5
    assert slices(table.index.names()) >= 5
    assert slices(table.topics_of_cluster("c")) >= 5
    assert slices(table.wipe_write("a")) >= 5
    table.drop_connection("line")
    assert finish_now(table.index.names()) == [], "it is gone at once"
    assert table.statistics()["topics"] == 3000
    assert slices(table.index.sweep()) >= 5
    assert table.statistics() == {"brokers": 0, "clusters": 0, "topics": 0, "topics_of_all_brokers": 0}


class Counting(dict[str, TopicQueues]):
    """A dict that counts how often somebody began to walk over it."""

    walks = 0

    def __iter__(self) -> Iterator[str]:
        self.walks += 1
        return super().__iter__()


def test_to_sweep_takes_a_time_in_proportion_to_the_topics() -> None:
    """Finding the first key of a dict skips all removed keys before it, which took 5 s for 90,000 topics."""
    table = RouteTable()
    register(table, broker("a", topics=shapes("T", "U", "V")), 0.0, "line")
    brokers = table._brokers["a"]
    brokers.topics = topics = Counting(brokers.topics)
    table.drop_connection("line")
    finish_now(table.index.sweep())
    assert (len(topics), topics.walks) == (0, 1)


def slices(steps: Steps[object]) -> int:
    return sum(1 for _ in steps)


def test_a_broker_that_comes_back_before_its_old_topics_are_swept_keeps_its_new_ones() -> None:
    table = RouteTable()
    register(table, broker("a", topics=shapes("T", "U", "old")), 0.0)
    table.unregister("c", "a", "a:0")
    register(table, broker("a", topics=shapes("T", "U")), 1.0)
    table.delete_topic("U")
    finish_now(table.index.sweep())
    assert finish_now(table.index.names()) == ["T"]
    assert table.statistics()["topics_of_all_brokers"] == 1


def test_nothing_remains_of_a_broker_that_unregisters_while_it_registers() -> None:
    table = RouteTable()
    steps = table.register(broker("a", topics=shapes(*(f"t{number}" for number in range(3000)))), 0.0, "line")
    next(steps)
    table.drop_connection("line")
    finish_now(steps)
    finish_now(table.index.sweep())
    assert table.statistics() == {"brokers": 0, "clusters": 0, "topics": 0, "topics_of_all_brokers": 0}


def test_a_topic_that_comes_while_the_whole_is_told_is_not_taken_for_missing() -> None:
    table = RouteTable()
    register(table, broker("a", topics=shapes("gone", "T"), complete=True), 0.0)
    names = tuple(f"t{number}" for number in range(3000))
    steps = table.register(broker("a", topics=shapes("T", *names), version=V2, complete=True), 1.0)
    next(steps)
    register(table, broker("a", topics=shapes("new"), version=Version(3)), 1.0)
    finish_now(steps)
    assert brokers_of(table, "new") == ["a"]
    assert brokers_of(table, "gone") == []
    assert table.version_of("c", "a:0") == Version(3)


class TableModel(RuleBasedStateMachine):
    """The table against plain sets of who registered what, masters only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RouteTable()
        self.now = 0.0
        self.counter = 0
        self.alive: dict[str, tuple[float, frozenset[str]]] = {}

    @rule(
        name=st.sampled_from("abc"),
        topics=st.frozensets(st.sampled_from("TUVW"), min_size=2),
        seconds=st.integers(1, 9),
    )
    def register(self, name: str, topics: frozenset[str], seconds: int) -> None:
        self.counter += 1
        new = broker(
            name,
            topics=shapes(*sorted(topics)),
            version=Version(self.counter),
            timeout_ms=seconds * 1000,
            complete=True,
        )
        register(self.table, new, self.now, name)
        self.alive[name] = (self.now + seconds, topics)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        if data.draw(st.booleans()):
            self.table.unregister("c", name, f"{name}:0")
        else:
            self.table.drop_connection(name)
        del self.alive[name]

    @rule(seconds=st.integers(0, 5))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        late = {name for name, (until, _) in self.alive.items() if until < self.now}
        assert set(self.table.expire(self.now)) == late
        for name in late:
            del self.alive[name]

    @invariant()
    def routes_are_those_of_the_living(self) -> None:
        for topic in "TUVW":
            expected = {name for name, (_, topics) in self.alive.items() if topic in topics}
            assert set(brokers_of(self.table, topic)) == expected
        assert {group.name for group in self.table.groups()} == set(self.alive)
        assert set(finish_now(self.table.index.names())) == {
            topic for _, topics in self.alive.values() for topic in topics
        }
        assert {name for names in self.table.clusters().values() for name in names} == set(self.alive)


TestTableModel = TableModel.TestCase
TestTableModel.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.sampled_from(["x", "y", "z"])), max_size=12))
def test_an_address_never_has_two_ids(steps: list[tuple[str, int, str]]) -> None:
    table = RouteTable()
    for name, number, address in steps:
        register(table, broker(name, number, address=f"{name}{address}"), 0.0)
    for group in table.groups():
        assert len(set(group.addresses.values())) == len(group.addresses)


def test_a_light_topic_is_on_every_broker_with_one_queue() -> None:
    table = RouteTable()
    assert table.route("%LMQ%x") is None
    register(table, broker("a"), 0.0)
    register(table, broker("b"), 0.0)
    route = table.route("%LMQ%x")
    assert route is not None
    assert route.queues == (TopicQueues("a", 1, 0, 4), TopicQueues("b", 1, 0, 4))
    assert [group.addresses for group in route.brokers.values()] == [{0: "a:0"}, {0: "b:0"}]
    assert table.route("%LMQ%") is None, "that is only how their names begin"
    table.unregister("c", "a", "a:0")
    assert brokers_of(table, "%LMQ%x") == ["b"]
    assert "%LMQ%x" not in finish_now(table.index.names())
