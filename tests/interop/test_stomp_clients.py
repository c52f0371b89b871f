"""Unmodified STOMP clients against Martlet: stomp.py with each version of the protocol."""

from collections.abc import Callable, Iterator
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Final

import pytest
import stomp  # type: ignore[import-untyped]
from stomp.utils import Frame  # type: ignore[import-untyped]

from .martlet_process import Martlet

PATIENCE_S: Final = 60
MODES: Final = ("auto", "client", "client-individual")
CONNECTIONS: Final = {"1.0": stomp.Connection10, "1.1": stomp.Connection11, "1.2": stomp.Connection12}
_numbers = count(1)


class Listener(stomp.ConnectionListener):  # type: ignore[misc]
    """Keeps what came, by kind."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[Frame] = SimpleQueue()
        self.receipts: SimpleQueue[str] = SimpleQueue()
        self.errors: SimpleQueue[Frame] = SimpleQueue()
        self.heartbeats: SimpleQueue[bool] = SimpleQueue()

    def on_message(self, frame: Frame) -> None:
        self.messages.put(frame)

    def on_receipt(self, frame: Frame) -> None:
        self.receipts.put(frame.headers["receipt-id"])

    def on_heartbeat(self) -> None:
        self.heartbeats.put(True)

    def on_error(self, frame: Frame) -> None:
        self.errors.put(frame)


class Client:
    """One connection of stomp.py."""

    def __init__(self, address: str, version: str, **options: Any) -> None:
        host, _, port = address.rpartition(":")
        self.version = version
        self.heard = Listener()
        self.connection = CONNECTIONS[version]([(host, int(port))], auto_content_length=False, **options)
        self.connection.set_listener("heard", self.heard)
        self.connection.connect(wait=True)

    def subscribe(self, destination: str, ack: str = "auto", **headers: str) -> None:
        receipt = f"sub {next(_numbers)}"
        self.connection.subscribe(destination, id="0", ack=ack, headers={"receipt": receipt, **headers})
        self.wait_receipt(receipt)

    def send(self, destination: str, *bodies: str, **headers: str) -> None:
        """Send *bodies*, and wait until they are stored."""
        for body in bodies:
            receipt = f"sent {next(_numbers)}"
            self.connection.send(destination, body, headers={"receipt": receipt, **headers})
            self.wait_receipt(receipt)

    def wait_receipt(self, receipt: str) -> None:
        assert self.heard.receipts.get(timeout=PATIENCE_S) == receipt

    def messages(self, count: int) -> list[Frame]:
        return [self.heard.messages.get(timeout=PATIENCE_S) for _ in range(count)]

    def bodies(self, count: int) -> list[str]:
        return [frame.body for frame in self.messages(count)]

    def settle(self, frame: Frame, how: str = "ack") -> None:
        settle = getattr(self.connection, how)
        if self.version == "1.2":
            settle(frame.headers["ack"])
        elif self.version == "1.1":
            settle(frame.headers["message-id"], frame.headers["subscription"])
        else:
            settle(frame.headers["message-id"])

    def has_nothing_more(self) -> bool:
        """Whether nothing came until the broker has done everything so far."""
        self.send("/queue/probe", "probe")
        try:
            self.heard.messages.get_nowait()
        except Empty:
            return True
        return False

    def disconnect(self) -> None:
        """Disconnect, and wait for the receipt of that."""
        self.connection.disconnect(receipt="bye")
        self.wait_receipt("bye")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Martlet]:
    martlet = Martlet(tmp_path_factory.mktemp("stomp"))
    yield martlet
    martlet.stop()


@pytest.fixture
def connect(broker: Martlet) -> Iterator[Callable[..., Client]]:
    opened: list[Client] = []

    def make(version: str, **options: Any) -> Client:
        opened.append(Client(broker.stomp, version, **options))
        return opened[-1]

    yield make
    for client in opened:
        if client.connection.is_connected():
            client.connection.disconnect()


@pytest.fixture
def queue() -> str:
    return f"/queue/q.{next(_numbers)}"


@pytest.mark.parametrize("ack", MODES)
@pytest.mark.parametrize("version", CONNECTIONS)
def test_what_is_sent_arrives_whole(connect: Callable[..., Client], queue: str, version: str, ack: str) -> None:
    client = connect(version)
    client.subscribe(queue, ack)
    text = "größer: \u2603\nnext\tline"
    headers = {"content-type": "text/plain", "colour": "dark blue"}
    if version != "1.0":
        headers["odd"] = "a:b\nc\\d"
    client.send(queue, text, **headers)
    (frame,) = client.messages(1)
    assert frame.body == text
    assert {name: frame.headers[name] for name in headers} == headers
    assert frame.headers["destination"] == queue
    if ack != "auto":
        client.settle(frame)
    assert client.has_nothing_more()
    client.disconnect()


@pytest.mark.parametrize("version", CONNECTIONS)
def test_acknowledgements_settle_what_their_mode_says(connect: Callable[..., Client], queue: str, version: str) -> None:
    bodies = [str(number) for number in range(5)]
    connect(version).send(queue, *bodies)
    one = connect(version)
    one.subscribe(queue, "client-individual")
    one.settle(one.messages(5)[1])
    one.disconnect()
    two = connect(version)
    two.subscribe(queue, "client")
    frames = two.messages(4)
    assert [frame.body for frame in frames] == ["0", "2", "3", "4"]
    assert {frame.headers["redelivered"] for frame in frames} == {"true"}
    two.settle(frames[2])
    two.disconnect()
    three = connect(version)
    three.subscribe(queue)
    assert three.bodies(1) == ["4"]
    assert three.has_nothing_more()


@pytest.mark.parametrize("version", ["1.1", "1.2"])
def test_a_refused_message_comes_again(connect: Callable[..., Client], queue: str, version: str) -> None:
    client = connect(version)
    client.subscribe(queue, "client-individual")
    client.send(queue, "x")
    client.settle(client.messages(1)[0], "nack")
    (frame,) = client.messages(1)
    assert (frame.body, frame.headers["delivery-count"]) == ("x", "2")
    client.settle(frame)
    assert client.has_nothing_more()


@pytest.mark.parametrize("version", CONNECTIONS)
def test_a_transaction_is_all_or_nothing(connect: Callable[..., Client], queue: str, version: str) -> None:
    client = connect(version)
    client.subscribe(queue)
    for end, bodies in (("abort", ["1", "2"]), ("commit", ["3", "4"])):
        name = client.connection.begin()
        for body in bodies:
            client.connection.send(queue, body, headers={"transaction": name})
        assert client.has_nothing_more()
        getattr(client.connection, end)(name)
    assert client.bodies(2) == ["3", "4"]
    assert client.has_nothing_more()


@pytest.mark.parametrize("version", CONNECTIONS)
def test_a_topic_reaches_every_subscriber(connect: Callable[..., Client], version: str) -> None:
    topic = f"/topic/t{next(_numbers)}"
    clients = [connect(version) for _ in range(3)]
    for client in clients:
        client.subscribe(topic)
    clients[0].send(topic, "1", "2")
    assert [client.bodies(2) for client in clients] == [["1", "2"]] * 3


def test_an_error_says_what_is_wrong(connect: Callable[..., Client]) -> None:
    client = connect("1.2")
    client.connection.send("/exchange/x", "x", headers={"receipt": "r"})
    error = client.heard.errors.get(timeout=PATIENCE_S)
    assert error.headers["receipt-id"] == "r"
    assert "'/exchange/x' is unknown" in error.body


@pytest.mark.parametrize("version", CONNECTIONS)
def test_binary_bodies_arrive_whole(connect: Callable[..., Client], queue: str, version: str) -> None:
    client = connect(version, auto_decode=False)
    client.subscribe(queue)
    body = bytes(range(256)) * 40
    client.connection.send(queue, body, headers={"content-length": str(len(body))})
    assert client.messages(1)[0].body == body


@pytest.mark.parametrize("version", ["1.1", "1.2"])
def test_heart_beats_go_both_ways(connect: Callable[..., Client], queue: str, version: str) -> None:
    client = connect(version, heartbeats=(500, 500), heart_beat_receive_scale=PATIENCE_S)
    for _ in range(3):
        client.heard.heartbeats.get(timeout=PATIENCE_S)
    client.send(queue, "x")
    client.disconnect()
