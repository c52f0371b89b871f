"""Two brokers with one name: when one registers or unregisters, the other notices and registers again."""

from martlet.runtime.steps import finish_now
from martlet_remoting.nameserver.table import RouteTable
from martlet_remoting.wire.register_broker import Registration
from martlet_remoting.wire.routes import TopicShape, Version

TOPICS = (TopicShape("A", 4, 4, 6), TopicShape("B", 4, 4, 6))


def broker(address: str, *topics: TopicShape) -> Registration:
    return Registration("c", "b", 0, address, version=Version(1), topics=topics or TOPICS)


def test_a_broker_whose_place_was_taken_is_not_known_as_it_was() -> None:
    table = RouteTable()
    finish_now(table.register(broker("one:1"), 0.0))
    assert table.version_of("c", "one:1") == Version(1)
    finish_now(table.register(broker("two:1"), 1.0, "connection"))
    assert table.version_of("c", "one:1") is None  # so it registers as a whole again
    table.drop_connection("connection")
    assert table.route("A") is None
    assert table.version_of("c", "one:1") is None
    finish_now(table.register(broker("one:1"), 2.0))
    route = table.route("A")
    assert route is not None
    assert route.brokers["b"].addresses == {0: "one:1"}
    assert table.version_of("c", "one:1") == Version(1)


def test_a_broker_that_comes_back_with_the_version_it_had_gets_its_topics_back() -> None:
    table = RouteTable()
    finish_now(table.register(broker("one:1"), 0.0))
    finish_now(table.register(broker("two:1", TopicShape("C", 1, 1, 6), TopicShape("D", 1, 1, 6)), 1.0))
    table.unregister("c", "b", "two:1")
    finish_now(table.register(broker("one:1"), 2.0))
    assert sorted(finish_now(table.index.names())) == ["A", "B"]
