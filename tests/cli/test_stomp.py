"""`martlet stomp`: what an administrator asks for."""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from martlet.net.addresses import split_address

Run = Callable[..., tuple[int, str, str]]

HELLO = b"CONNECT\naccept-version:1.2\nhost:h\nclient-id:shop\nheart-beat:0,60000\n\n\0"
SUBSCRIBE = b"SUBSCRIBE\nid:orders\ndestination:/queue/orders\nack:client\nprefetch-count:2\nreceipt:r\n\n\0"
SEND = b"SEND\ndestination:/queue/orders\n\nbook\0"


@pytest.fixture
def to(martlet: Run, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``martlet stomp WORDS`` against the broker of this module."""
    monkeypatch.setenv("MARTLET_STOMP", addresses["stomp"])
    return lambda *words: martlet("stomp", *words)


@pytest.fixture
def client(addresses: dict[str, str]) -> Iterator[str]:
    """The session of a client that holds two messages of a queue."""
    with socket.create_connection(split_address(addresses["stomp"])) as stream:
        stream.sendall(HELLO + SUBSCRIBE + SEND * 2)
        data = b""
        while data.count(b"MESSAGE\n") < 2 or b"RECEIPT\n" not in data:
            more = stream.recv(65_536)
            assert more, data
            data += more
        yield next(line for line in data.decode().splitlines() if line.startswith("session:")).removeprefix("session:")


def from_json(answer: tuple[int, str, str]) -> Any:
    code, out, err = answer
    assert (code, err) == (0, "")
    return json.loads(out)


def test_connections_are_listed_without_the_one_that_asks(to: Run, client: str) -> None:
    (row,) = from_json(to("connections", "--json"))
    wanted = {"session": client, "version": "1.2", "client_id": "shop", "subscriptions": 1, "transactions": 0}
    assert row.items() >= wanted.items()
    code, out, err = to("connections")
    assert (code, err) == (0, "")
    assert [*out.splitlines()[0].lower().split()][:2] == ["session", "user"]
    assert client in out


def test_subscriptions_are_listed_with_what_is_not_acknowledged(to: Run, client: str) -> None:
    (row,) = from_json(to("subscriptions", "--json"))
    wanted = {"session": client, "id": "orders", "destination": "/queue/orders", "ack": "client", "held": 2}
    assert row.items() >= {**wanted, "prefetch": 2, "selector": None, "durable": None, "exclusive": False}.items()
    code, out, err = to("subscriptions")
    assert (code, err) == (0, "")
    assert "/queue/orders" in out


def test_without_clients_there_are_no_rows(to: Run) -> None:
    assert from_json(to("connections", "--json")) == from_json(to("subscriptions", "--json")) == []


def test_what_cannot_be_done_is_said_in_one_line(to: Run, addresses: dict[str, str]) -> None:
    wrong = [("127.0.0.1:1", "start one with `martlet run`"), (addresses["mqtt"], "closed the connection")]
    for address, text in wrong:
        code, out, err = to("connections", "--address", address)
        assert (code, out) == (3, ""), err
        assert text in err
        assert "Traceback" not in err


@pytest.mark.parametrize("other", ["mqtt", "remoting", "nameserver"])
def test_a_port_of_another_protocol_is_named(martlet: Run, addresses: dict[str, str], other: str) -> None:
    code, _, err = martlet("stomp", "connections", "--address", addresses[other])
    assert (code, err.rpartition("; ")[2]) == (3, "is it a STOMP port?\n")


def test_queues_are_listed_and_freed(to: Run, addresses: dict[str, str]) -> None:
    with socket.create_connection(split_address(addresses["stomp"])) as stream:
        stream.sendall(HELLO + SUBSCRIBE.replace(b"orders", b"freed"))
        data = b""
        while b"RECEIPT\n" not in data:
            data += stream.recv(65_536)
        rows = {row["destination"]: row for row in from_json(to("queues", "--json"))}
        assert rows["/queue/freed"].items() >= {"consumers": 1, "waiting": 0, "owns_topic": True}.items()
        code, out, err = to("delete", "/queue/freed")
        assert (code, out) == (1, "")
        assert "has 1 consumers" in err
        stream.sendall(b"DISCONNECT\nreceipt:bye\n\n\0")
        while stream.recv(65_536):
            pass
    assert to("delete", "freed") == (0, "deleted /queue/freed with its topic and 0 waiting messages\n", "")
    code, out, err = to("queues")
    assert (code, "/queue/freed" in out, err) == (0, False, "")
    code, out, err = to("delete", "/queue/freed")
    assert (code, out) == (1, "")
    assert "nobody ever consumed the queue" in err
