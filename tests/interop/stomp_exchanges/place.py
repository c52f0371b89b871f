"""Where an exchange takes place, and how it is registered and put into words."""

from collections.abc import Callable
from typing import Final

from tests.interop.stomp_wire import Closed, Frame, Wire

END: Final = "end"
DEAD: Final = ("/queue/ActiveMQ.DLQ", "/queue/stomp_dead_letters")


class Place:
    """A broker, a queue and a topic that no other exchange uses, and the connections of this one."""

    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self.name = name
        self.queue, self.topic = f"/queue/{name}", f"/topic/{name}"
        self._open: list[Wire] = []

    def unconnected(self) -> Wire:
        """Return a connection without CONNECT."""
        self._open.append(Wire(self.port))
        return self._open[-1]

    def wire(self, **headers: str) -> Wire:
        """Return a connection after CONNECT with *headers*."""
        wire = self.unconnected()
        wire.connect(**headers)
        return wire

    def holder(self, *bodies: str, ack: str = "client-individual", **headers: str) -> tuple[Wire, list[Frame]]:
        """Send *bodies*; return a consumer that got them, and them."""
        wire = self.wire()
        wire.subscribe(self.queue, ack, **headers)
        wire.publish(self.queue, *bodies)
        return wire, wire.messages(len(bodies))

    def rest(self, last: str = "", queue: str = "") -> list[Frame]:
        """Return what the queue has, up to the message *last* that must come, if one must."""
        wire = self.wire()
        wire.subscribe(queue or self.queue)
        found: list[Frame] = []
        while last and last not in [each.text for each in found]:
            found.append(wire.message())
        wire.publish(queue or self.queue, END)
        while (message := wire.message()).text != END:
            found.append(message)
        wire.leave()
        return found

    def browse(self, queue: str) -> list[str]:
        """Return what a browser is shown of *queue*."""
        wire, found = self.wire(), list[str]()
        wire.subscribe(queue, browser="true")
        while (message := wire.message()).headers.get("browser") != "end":
            found.append(message.text)
        wire.leave()
        return found

    def close(self) -> None:
        for wire in self._open:
            wire.close()


Exchange = Callable[[Place], str]
EXCHANGES: Final[dict[str, Exchange]] = {}


def exchange(title: str) -> Callable[[Exchange], Exchange]:
    """Make a function the exchange *title*."""

    def register(function: Exchange) -> Exchange:
        assert title not in EXCHANGES, title
        EXCHANGES[title] = function
        return function

    return register


def texts(messages: list[Frame]) -> str:
    return " ".join(message.text for message in messages) or "nothing"


def ended(wire: Wire, answer: Callable[[], Frame]) -> str:
    """Return which answer comes, and what becomes of the connection."""
    try:
        command = answer().command
    except Closed:
        return "closed"
    return f"{command}, {'closed' if wire.is_closed() else 'open'}"


def outcome(wire: Wire, command: str, body: str = "", **headers: str) -> str:
    """Send a frame with a receipt; return which answer comes, and what becomes of the connection."""
    return ended(wire, lambda: wire.ask(command, body, **headers))
