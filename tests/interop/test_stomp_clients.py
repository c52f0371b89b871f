"""Unmodified STOMP clients against Martlet: stomp.py, @stomp/stompjs over WebSocket and Vert.x's client of
Java, with the versions of the protocol that they speak, and with TLS.
"""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest
import trustme

from .martlet_process import Martlet
from .process import free_port
from .stomp_clients import Client, Clients, Message, Steered, StompPyClients, java_words, node_words

MODES: Final = ("auto", "client", "client-individual")
# Vert.x acknowledges as STOMP 1.2 does, so it speaks no other version. stomp.py leaves a thread behind when a
# connection with TLS is dropped.
WAYS: Final = (
    "python-1.0",
    "python-1.1",
    "python-1.2",
    "python-1.2 TLS",
    "node-1.1 TLS",
    "node-1.2",
    "java",
    "java TLS",
)
END: Final = "end"
_numbers = count(1)

Connect = Callable[..., Client]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with those of the broker, and of its authority."""
    folder, authority = tmp_path_factory.mktemp("certificates"), trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return folder


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Martlet]:
    settings = {"stomp.redeliveries_max": "1", "stomp.tls_cert": str(certificates / "server.pem")}
    martlet = Martlet(tmp_path_factory.mktemp("stomp"), settings)
    yield martlet
    martlet.stop()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Steered]]:
    node = Steered(node_words(), tmp_path_factory.mktemp("node"), reconnects=True)
    java = Steered(java_words(), tmp_path_factory.mktemp("java"), reconnects=False)
    yield {"node": node, "java": java}
    node.stop()
    java.stop()


def clients_of(way: str, libraries: dict[str, Steered], certificates: Path) -> Clients:
    """Return the library of *way*, for its version, and for TLS if that is in it."""
    name, _, tls = way.partition(" ")
    language, _, version = name.partition("-")
    if language == "python":
        return StompPyClients(version)
    library = libraries[language]
    library.version, library.ca = version or "1.2", str(certificates / "ca.pem") if tls else ""
    return library


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clients(libraries: dict[str, Steered], certificates: Path, way: str) -> Iterator[Clients]:
    found = clients_of(way, libraries, certificates)
    yield found
    found.close()


@pytest.fixture
def connect(clients: Clients, broker: Martlet) -> Connect:
    return lambda **options: clients.connect(broker.stomp, **options)


@pytest.fixture
def queue() -> str:
    return f"/queue/q.{next(_numbers)}"


@pytest.fixture
def topic() -> str:
    return f"/topic/t.{next(_numbers)}"


def texts(messages: list[Message]) -> list[str]:
    return [message.text for message in messages]


def send_all(client: Client, destination: str, *bodies: str) -> None:
    for body in bodies:
        client.send(destination, body)


def has_nothing(connect: Connect, queue: str) -> bool:
    """Whether nothing is in *queue*: a new consumer gets what is sent now, and nothing before it."""
    client = connect()
    client.subscribe(queue)
    client.send(queue, END)
    return texts(client.heard.take(1)) == [END]


@pytest.mark.parametrize("ack", MODES)
def test_texts_and_headers_arrive_whole(connect: Connect, queue: str, way: str, ack: str) -> None:
    client = connect()
    client.subscribe(queue, ack)
    text = "größer: \u2603\nnext\tline"
    headers = {"content-type": "text/plain", "colour": "dark blue"}
    if way not in ("python-1.0", "node-1.1 TLS"):  # which do not escape them
        headers["odd"] = "a:b\nc\\d"
    client.send(queue, text, **headers)
    [message] = client.heard.take(1)
    assert message.text == text
    assert {name: message.headers[name] for name in headers} == headers
    assert message.headers["destination"] == queue
    if ack != "auto":
        client.settle(message)
    client.disconnect()
    assert has_nothing(connect, queue)


def test_binary_bodies_arrive_whole(connect: Connect, queue: str) -> None:
    client = connect()
    client.subscribe(queue)
    body = bytes(range(256)) * 400
    client.send(queue, body)
    assert client.heard.take(1)[0].body == body


def test_acknowledgements_settle_what_their_mode_says(connect: Connect, queue: str) -> None:
    send_all(connect(), queue, *"01234")
    one = connect()
    one.subscribe(queue, "client-individual")
    one.settle(one.heard.take(5)[1])
    one.disconnect()
    two = connect()
    two.subscribe(queue, "client")
    messages = two.heard.take(4)
    assert texts(messages) == ["0", "2", "3", "4"]
    assert {message.headers["redelivered"] for message in messages} == {"true"}
    two.settle(messages[2])
    two.disconnect()
    three = connect()
    three.subscribe(queue)
    assert texts(three.heard.take(1)) == ["4"]
    three.disconnect()
    assert has_nothing(connect, queue)


def test_what_is_unsubscribed_goes_to_another_client(connect: Connect, queue: str) -> None:
    one, two = connect(), connect()
    one.subscribe(queue, "client-individual")
    send_all(two, queue, "0", "1")
    assert texts(one.heard.take(2)) == ["0", "1"]
    one.unsubscribe(queue)
    two.subscribe(queue)
    assert texts(two.heard.take(2)) == ["0", "1"]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "python-1.0"], indirect=True)  # STOMP 1.0 has no NACK
def test_a_refused_message_comes_again_and_then_becomes_a_dead_letter(connect: Connect, queue: str) -> None:
    client, dead = connect(), connect()
    dead.subscribe("stomp_dead_letters")
    client.subscribe(queue, "client-individual")
    client.send(queue, f"of {queue}", colour="red")
    for delivery in ("1", "2"):
        [message] = client.heard.take(1)
        assert message.headers.get("delivery-count", "1") == delivery
        client.settle(message, "nack")
    [letter] = dead.heard.take(1)
    assert (letter.text, letter.headers["colour"]) == (f"of {queue}", "red")
    assert letter.headers["original-destination"] == queue
    client.disconnect()
    assert has_nothing(connect, queue)


def test_a_transaction_of_sends_is_all_or_nothing(connect: Connect, queue: str) -> None:
    client = connect()
    client.subscribe(queue)
    for end, bodies in (("abort", "12"), ("commit", "34")):
        client.begin(end)
        for body in bodies:
            client.send(queue, body, transaction=end)
        client.send(queue, f"before {end}")
        client.end(end, end)
    client.send(queue, END)
    assert texts(client.heard.take(5)) == ["before abort", "before commit", "3", "4", END]


def test_a_transaction_of_acknowledgements_is_all_or_nothing(connect: Connect, queue: str) -> None:
    send_all(connect(), queue, *"01")
    for end, rest in (("abort", ["0", "1"]), ("commit", [])):
        client = connect()
        client.subscribe(queue, "client-individual")
        client.begin(end)
        for message in client.heard.take(2):
            client.settle(message, transaction=end)
        client.end(end, end)
        client.disconnect()
        other = connect()
        other.subscribe(queue, "client-individual")
        assert texts(other.heard.take(len(rest))) == rest
        other.disconnect()
    assert has_nothing(connect, queue)


def test_a_topic_reaches_every_subscriber(connect: Connect, topic: str) -> None:
    several = [connect() for _ in range(3)]
    for client in several:
        client.subscribe(topic)
    send_all(several[0], topic, "1", "2")
    assert [texts(client.heard.take(2)) for client in several] == [["1", "2"]] * 3


def test_a_durable_subscription_gets_what_it_missed(connect: Connect, topic: str) -> None:
    durable = {"activemq.subscriptionName": "s"}
    publisher = connect()

    def subscribed() -> Client:
        client = connect(client_id=topic)
        client.subscribe(topic, "client-individual", **durable)
        return client

    subscribed().disconnect()
    send_all(publisher, topic, "missed")
    client = subscribed()
    send_all(publisher, topic, "new")
    messages = client.heard.take(2)
    assert texts(messages) == ["missed", "new"]
    client.settle(messages[0])
    client.disconnect()
    client = subscribed()
    assert texts(client.heard.take(1)) == ["new"]
    client.unsubscribe(topic, **durable)
    client.disconnect()
    send_all(publisher, topic, "for nobody")
    client = subscribed()
    send_all(publisher, topic, END)
    assert texts(client.heard.take(1)) == [END]


def test_a_request_gets_its_reply(connect: Connect, queue: str) -> None:
    service, client = connect(), connect()
    service.subscribe(queue, "client-individual")
    client.subscribe(f"{queue}.replies")
    client.send(queue, "what?", reply_to=f"{queue}.replies", correlation_id="7")
    [asked] = service.heard.take(1)
    service.send(asked.headers["reply-to"], f"answer to {asked.text}", correlation_id=asked.headers["correlation-id"])
    service.settle(asked)
    [reply] = client.heard.take(1)
    assert (reply.text, reply.headers["correlation-id"]) == ("answer to what?", "7")


def test_a_client_that_reconnects_gets_what_it_had_not_acknowledged(connect: Connect, queue: str) -> None:
    client = connect()
    client.subscribe(queue, "client-individual")
    send_all(client, queue, *"012")
    client.settle(client.heard.take(3)[1])
    client.drop()
    client.reconnect()
    client.subscribe(queue, "client-individual")
    messages = client.heard.take(2)
    assert texts(messages) == ["0", "2"]
    for message in messages:
        client.settle(message)
    client.disconnect()
    assert has_nothing(connect, queue)


def test_heart_beats_go_both_ways(libraries: dict[str, Steered], certificates: Path, broker: Martlet) -> None:
    """A client that sends none for 6 s is disconnected; 15 of the broker take longer."""
    beating: dict[str, Client] = {}
    used: list[Clients] = []
    for way in WAYS:
        if way != "python-1.0":
            used.append(clients_of(way, libraries, certificates))
            beating[way] = used[-1].connect(broker.stomp, (3000, 500))
    for client in beating.values():
        client.heard.wait(lambda heard: heard.beats >= 15 or None)
    for way, client in beating.items():
        client.send("/queue/probe", way)
        assert (client.heard.connected, client.heard.errors) == (1, [])
    for clients in used:
        clients.close()


def test_an_error_says_what_is_wrong(connect: Connect) -> None:
    client = connect()
    with pytest.raises(RuntimeError):
        client.send("/elsewhere/x", "x")
    [(text, receipt)] = client.heard.wait(lambda heard: heard.errors or None)
    assert "'/elsewhere/x' is unknown" in text
    assert receipt


def test_clients_go_on_after_the_broker_was_killed(clients: Clients, tmp_path: Path, certificates: Path) -> None:
    settings = {"stomp.listen": f"127.0.0.1:{free_port()}", "stomp.tls_cert": str(certificates / "server.pem")}
    broker = Martlet(tmp_path, {**settings, "store.flush": "sync"})
    try:
        client = clients.connect(broker.stomp)
        client.subscribe("/queue/q", "client-individual")
        send_all(client, "/queue/q", *"012")
        client.settle(client.heard.take(3)[0])
        broker.kill()
        broker.start()
        client.reconnect()
        client.subscribe("/queue/q", "client-individual")
        assert texts(client.heard.take(2)) == ["1", "2"]
        client.send("/queue/q", "3")
        assert texts(client.heard.take(1)) == ["3"]
        clients.close()
    finally:
        broker.close()
