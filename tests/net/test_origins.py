"""Which connection is closed in favour of one from an address with fewer connections."""

from martlet.net.addresses import pack_host
from martlet.net.origins import Origins, origin_of


def test_the_clients_of_one_address_belong_together() -> None:
    def origin(host: str, port: int = 1) -> bytes:
        return origin_of(pack_host(host, port))

    assert origin("10.0.0.1") == origin("10.0.0.1", 2) != origin("10.0.0.2")
    assert origin("2001:db8::1") == origin("2001:db8::2:1") != origin("2001:db8:0:1::1")
    assert origin("::ffff:10.0.0.1") != origin("::ffff:10.0.0.2")


def test_the_newest_of_the_most_crowded_address_gives_way() -> None:
    origins: Origins[str] = Origins()
    for name in ("a1", "a2", "a3", "b1", "b2"):
        origins.add(name, name[:1].encode())
    assert origins.give_way(b"a") is None
    assert origins.give_way(b"c") == "a3"
    origins.add("c1", b"c")
    assert origins.largest() == 2
    assert origins.give_way(b"c") is None, "it would have as many"
    assert origins.give_way(b"d") == "a2"


def test_nobody_gives_way_to_an_address_that_has_its_share() -> None:
    origins: Origins[int] = Origins()
    for number in range(100):
        origins.add(number, bytes([number]))
    assert origins.give_way(b"new") is None
    assert origins.give_way(bytes([7])) is None


def test_closed_connections_are_not_counted() -> None:
    origins: Origins[str] = Origins()
    origins.add("a1", b"a")
    origins.remove("a1", b"a")
    origins.remove("a1", b"a")
    origins.remove("b1", b"b")
    assert (origins.largest(), origins.give_way(b"c")) == (0, None)
