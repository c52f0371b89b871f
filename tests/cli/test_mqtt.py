"""`martlet mqtt`: publish, subscribe, and what an administrator asks for."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from martlet.cli.server import ServerSettings
from martlet.net.addresses import split_address
from martlet_mqtt.commands.client import MqttClient, MqttFailed
from martlet_mqtt.wire.packets import FilterSubscription, Publish

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def to(martlet: Run, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``martlet mqtt WORDS`` against the broker of this module."""
    monkeypatch.setenv("MARTLET_MQTT", addresses["mqtt"])
    return lambda *words: martlet("mqtt", *words)


@pytest.fixture
def device(addresses: dict[str, str]) -> Iterator[MqttClient]:
    """A client that stays connected."""
    with connected(addresses, "device") as client:
        yield client


def connected(addresses: dict[str, str], client_id: str) -> MqttClient:
    host, port = split_address(addresses["mqtt"])
    return MqttClient(ServerSettings("MQTT", host, port, 60.0), client_id)


def from_json(answer: tuple[int, str, str]) -> Any:
    code, out, err = answer
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_retained_message_is_printed_and_listed_until_it_is_removed(to: Run) -> None:
    words = ("--retain", "--content-type", "text/plain", "--property", "room=hall")
    assert to("publish", "kept/door", "open", *words) == (0, "published 4 bytes to kept/door\n", "")
    assert to("subscribe", "kept/#", "--count", "1") == (0, "kept/door open\n", "")
    message = from_json(to("subscribe", "kept/+", "--count", "1", "--json"))
    assert (message["topic"], message["retain"], message["properties"]) == ("kept/door", True, [["room", "hall"]])
    assert "open" in message.values()
    assert [row["name"] for row in from_json(to("retained", "kept/#", "--json"))] == ["kept/door"]
    assert to("publish", "kept/door", "--retain")[0] == 0
    assert from_json(to("retained", "kept/#", "--json")) == []
    assert to("subscribe", "kept/#", "--for", "0.1") == (0, "", "")


@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_each_quality_of_service_arrives(to: Run, device: MqttClient, qos: str) -> None:
    device.subscribe(FilterSubscription("live/+", 2))
    assert from_json(to("publish", "live/a", "text", "--qos", qos, "--json")) == {
        "topic": "live/a",
        "bytes": 4,
        "qos": int(qos),
    }
    message = device.next_message(None)
    assert isinstance(message, Publish)
    assert (message.topic, message.payload, message.qos) == ("live/a", b"text", int(qos))


def test_clients_and_their_subscriptions_are_listed(to: Run, device: MqttClient) -> None:
    device.subscribe(FilterSubscription("seen/#", 1, no_local=True))
    rows = {row["client"]: row for row in from_json(to("clients", "--json"))}
    assert (
        rows["device"].items()
        >= {"connected": True, "version": "5", "subscriptions": 1, "in_flight": 0, "missed": 0}.items()
    )
    (row,) = from_json(to("subscriptions", "--client", "device", "--json"))
    assert row.items() >= {"client": "device", "filter": "seen/#", "qos": 1, "no_local": True}.items()
    code, out, err = to("subscriptions", "--client", "device")
    assert (code, err) == (0, "")
    assert "seen/#" in out
    assert from_json(to("subscriptions", "--client", "nobody", "--json")) == []


def test_the_list_of_clients_shows_what_they_missed(to: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, object]] = [{"client": "a", "missed": 1234}, {"client": "b", "missed": None}, {"client": "c"}]
    monkeypatch.setattr("martlet_mqtt.commands.command._rows", lambda *_: iter([row.copy() for row in rows]))
    code, out, err = to("clients")
    assert (code, err) == (0, "")
    head, *lines = (line.split() for line in out.splitlines())
    assert [line[head.index("missed")] for line in lines] == ["1,234", "?", "-"]
    assert from_json(to("clients", "--json")) == rows


def test_a_client_is_disconnected_with_the_reason(to: Run, addresses: dict[str, str]) -> None:
    with connected(addresses, "kicked") as client:
        assert to("kick", "kicked") == (0, "client kicked is disconnected; its session stays\n", "")
        with pytest.raises(MqttFailed, match="administrator"):
            client.next_message(None)
    code, out, err = to("kick", "kicked")
    assert (code, out) == (1, "")
    assert "client 'kicked' is not connected" in err


def test_shared_subscriptions_are_listed_and_freed(to: Run, addresses: dict[str, str]) -> None:
    with connected(addresses, "worker") as client:
        client.subscribe(FilterSubscription("$share/workers/jobs/#", 1))
        (row,) = from_json(to("shared", "--json"))
        assert row == {"filter": "$share/workers/jobs/#", "topic": "mqtt", "members": 1, "held": 0}
        code, out, err = to("forget", "$share/workers/jobs/#")
        assert (code, out) == (1, "")
        assert "has 1 members" in err
    assert to("forget", "$share/workers/jobs/#")[0] == 0
    code, out, err = to("shared")
    assert (code, "workers" in out, err) == (0, False, "")
    code, out, err = to("forget", "$share/workers/jobs/#")
    assert (code, out) == (1, "")
    assert "nothing is known" in err
    assert "write $share/GROUP/FILTER" in to("forget", "jobs/#")[2]


WRONG = [
    (1, ("publish", "a/#", "x"), "contains a wildcard"),
    (1, ("publish", "$SYS/broker/version", "x"), "only the broker publishes"),
    (1, ("subscribe", "a/#/b", "--count", "1"), "wildcard"),
    (2, ("publish", "a", "x", "--property", "nothing"), "write NAME=VALUE"),
    (3, ("clients", "--address", "127.0.0.1:1"), "start one with `martlet run`"),
]


@pytest.mark.parametrize(("code", "words", "text"), WRONG)
def test_what_cannot_be_done_is_said_in_one_line(to: Run, code: int, words: tuple[str, ...], text: str) -> None:
    got, out, err = to(*words)
    assert (got, out) == (code, ""), err
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize("other", ["stomp", "remoting", "nameserver"])
def test_a_port_of_another_protocol_is_named(martlet: Run, addresses: dict[str, str], other: str) -> None:
    code, _, err = martlet("mqtt", "clients", "--address", addresses[other])
    assert (code, err.rpartition("; ")[2]) == (3, "is it an MQTT port?\n")
