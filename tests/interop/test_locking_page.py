"""The page on locking an open broker: its commands, run as they are printed, while clients of all protocols work."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.page_shell import PageShell
from tests.client.listening import PATIENCE_S

from martlet.errors import MartletError
from martlet_client import ClientSettings, Message
from martlet_client.blocking import PopConsumer, Producer
from martlet_remoting.wire.signatures import SigningKey

from . import mqtt_clients, stomp_clients
from .martlet_process import Martlet
from .process import eventually, free_port

PAGE = (Path(__file__).parents[2] / "docs" / "locking.md").read_text()
INIT, SEE, USERS, ALLOW, LOOK, LOCK, BACK = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
(CONFIG,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
NOTHING = "nothing would have been refused"


class Clients:
    """A RocketMQ client, an MQTT client and a STOMP client; each logs in once it is switched, else it is anonymous."""

    def __init__(self, broker: Martlet, folder: Path) -> None:
        self._broker, self._folder = broker, folder
        self._mqtt, self._stomp = mqtt_clients.PahoClients(), stomp_clients.StompPyClients("1.2")
        self.switched: set[str] = set()

    def _secret(self, user: str) -> str | None:
        return (self._folder / f"{user}.secret").read_text().strip() if user in self.switched else None

    def shop(self) -> None:
        secret = self._secret("shop")
        settings = ClientSettings(
            self._broker.name_server,
            request_timeout_s=PATIENCE_S,
            connect_timeout_s=PATIENCE_S,
            signing_key=SigningKey("shop", secret) if secret else None,
        )
        with Producer(settings, "shop-producer") as producer, PopConsumer(settings, "shop") as consumer:
            producer.send(Message("orders", b"a book"))
            popped = consumer.receive("orders", messages_max=1, wait_s=PATIENCE_S)
            consumer.ack(*popped)
        assert [each.body for each in popped] == [b"a book"]

    def sensors(self) -> None:
        secret = self._secret("sensors")
        link = mqtt_clients.Link(f"mqtt://{self._broker.mqtt}", user="sensors" if secret else None, password=secret)
        client = self._mqtt.connect(link, "a sensor")
        if client.subscribe("home/#", 1) >= 0x80:
            raise mqtt_clients.LoginRefused("SUBACK refuses the filter")
        client.publish(mqtt_clients.Message("home/door", b"open"))
        assert [each.payload for each in client.inbox.wait(1)] == [b"open"]
        client.disconnect()

    def web(self) -> None:
        secret = self._secret("web")
        login = {"login": "web", "passcode": secret} if secret else {}
        client = self._stomp.connect(self._broker.stomp, (0, 0), **login)
        client.subscribe("/topic/news")
        client.send("/topic/news", "sale")
        assert [each.text for each in client.heard.take(1)] == ["sale"]
        client.disconnect()

    def durable_sensor(self, name: str, *, clean: bool = False) -> None:
        """Open a session of MQTT that outlives its connection, or end one."""
        secret = self._secret("sensors")
        link = mqtt_clients.Link(f"mqtt://{self._broker.mqtt}", user="sensors" if secret else None, password=secret)
        self._mqtt.connect(link, name, clean=clean, expiry_s=0 if clean else 600).disconnect()

    def durable_web(self) -> list[str]:
        """Return what has come to a durable subscription of STOMP; it ends with the connection only."""
        secret = self._secret("web")
        login = {"login": "web", "passcode": secret} if secret else {}
        client = self._stomp.connect(self._broker.stomp, (0, 0), **login)
        client.subscribe("/topic/news", number="page", durable="true")
        client.send("/topic/news", "more")
        texts = [client.heard.take(1)[0].text]
        client.disconnect()
        return texts

    def each(self) -> dict[str, Callable[[], None]]:
        return {"shop": self.shop, "sensors": self.sensors, "web": self.web}

    def work(self) -> None:
        """Let each send a message and get it."""
        for do in self.each().values():
            do()

    def close(self) -> None:
        self._mqtt.close()
        self._stomp.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def shell(folder: Path) -> Iterator[PageShell]:
    found = PageShell(folder)
    yield found
    found.close()


@pytest.fixture
def broker(folder: Path) -> Iterator[Martlet]:
    """A broker without access control, whose ports are the same after each start."""
    (folder / "martlet.toml").write_text('[broker]\ndata = "martlet-data"\n')
    ports = {f"{name}.listen": f"127.0.0.1:{free_port()}" for name in ("mqtt", "stomp")}
    found = Martlet(folder, ports, data=folder / "martlet-data")
    yield found
    found.close()


@pytest.fixture
def clients(broker: Martlet, folder: Path) -> Iterator[Clients]:
    found = Clients(broker, folder)
    yield found
    found.close()


def test_the_page_locks_a_broker_whose_clients_go_on(
    broker: Martlet, clients: Clients, folder: Path, shell: PageShell
) -> None:
    def run(commands: str) -> str:
        return shell.run(commands, {"MARTLET_CONFIG": str(folder / "martlet.toml")})

    clients.work()
    assert CONFIG in run(INIT)
    broker.stop()
    broker.settings["plugins.enabled"] = CONFIG.partition("= ")[2].strip()
    broker.start()
    clients.work()
    said = run(SEE)
    for line in (
        r"anonymous +subscribe +topic:orders +\d+ +remoting +127\.0\.0\.1 ",
        r"anonymous +subscribe +name:mqtt/home/# +\d+ +mqtt +127\.0\.0\.1 ",
        r"anonymous +subscribe +topic:news +\d+ +stomp +127\.0\.0\.1 ",
    ):
        assert re.search(line, said), said
    run(USERS)
    for session in ("kept", "ended"):
        clients.durable_sensor(session)
    clients.durable_sensor("ended", clean=True)
    clients.durable_web()
    for user, do in clients.each().items():
        clients.switched.add(user)
        do()
        assert re.search(rf"(?m)^{user} +publish ", run(SEE))
    clients.durable_sensor("ended")
    clients.durable_sensor("another")
    with pytest.raises(mqtt_clients.LoginRefused, match="Not authorized"):
        clients.durable_sensor("kept")
    assert clients.durable_web() == ["more"]
    assert "martlet acl allow user:shop " in run(ALLOW)

    observe, *rest = LOOK.splitlines()
    run(observe)
    clients.switched.remove("web")
    clients.work()
    said = run("\n".join(rest))
    assert set(re.findall(r"(?m)^(\S+) +(?:publish|subscribe|get|create|login) ", said)) == {"anonymous"}
    assert "shop may publish topic:orders\n" in said
    assert "anonymous may not publish topic:orders\n" in said
    clients.switched.add("web")
    run(observe)
    clients.work()
    assert NOTHING in run(rest[0])

    run(LOCK)
    clients.work()
    for user, do in clients.each().items():
        clients.switched.remove(user)
        with pytest.raises((MartletError, mqtt_clients.LoginRefused, RuntimeError)):
            do()
    back, audit = BACK.splitlines()
    resources = [f'"resource":"{each}"' for each in ("topic:orders", "name:mqtt/home/#", "topic:news")]
    # The trail is written by a thread.
    eventually(lambda: True if all(map(run(f"{audit} || true").__contains__, resources)) else None)
    run(back)
    clients.work()


def test_every_command_of_the_page_is_tried() -> None:
    assert PAGE.count("```") == 2 * 8
