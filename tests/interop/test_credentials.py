"""Stock clients with right, wrong, rotated, disabled and expired credentials, against the plugin acl.

Each sees an error of its own, and nothing of what it sends is stored. Each case has a user and a topic of its own, so
that all share one broker.
"""

import itertools
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import jwt
import pyarrow as pa
import pytest
import trustme
from pyspark.sql.types import StringType, StructField, StructType
from tests.acl.test_tokens import CLAIMS, PRIVATE, jwk
from tests.client.listening import PATIENCE_S

from martlet.errors import MartletError
from martlet.net.unix_sockets import connect_unix
from martlet_acl.endpoint import NAME
from martlet_client import ClientSettings, Message
from martlet_client.blocking import Admin, Producer, PullConsumer
from martlet_remoting.wire.signatures import SigningKey
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import SparkConnectorError
from martlet_spark.source import MartletDataSource

from . import fetch, mqtt_clients, stomp_clients
from .acl_brokers import ROOT, acl_martlet
from .java import Failed, Java, Jvm, message
from .other_clients import Program, send_words

# The end of an error as each client shows it: a login that is refused, and a connection that the broker has ended.
LOGINS: Final = {
    "paho": (r"Bad user name or password", r"Administrative action"),
    "paho-3": (r"Bad user name or password|Not authorized", r"Unspecified error|Normal disconnection"),
    "mqtt.js": (r"Bad User Name or Password", r"152"),
    "stomp.py": (r"password is wrong|is disabled|token", r"was disabled, or has other passwords"),
    "stompjs": (r"password is wrong|is disabled|token", r"was disabled, or has other passwords"),
}
# A request that is refused, whatever of its signature is wrong: the name server tells such a client of no topic.
SIGNERS: Final = {
    "java": r"No route info of this topic|MQClientException 16: ",
    "python": r"NO_PERMISSION",
    "go": r"route info not found",
    "cpp": r"No route info of this topic",
    "node": r"access key '\w+' or the signature is wrong",
    "spark": r"check the options accessKey and secretKey",
}
CASES: Final = [
    *((client, case) for client in LOGINS for case in ("right", "wrong", "rotated", "disabled", "expired")),
    *((client, case) for client in SIGNERS for case in ("right", "wrong", "rotated", "disabled")),  # without tokens
]
SCHEMA: Final = StructType([StructField("body", StringType())])


class Refused(Exception):
    """What a client says of a refusal."""


class Client(Protocol):
    """One client that has logged in, or one that signs each request."""

    def send(self, text: str) -> None:
        """Send a message; raises `Refused`."""

    def wait_end(self) -> str:
        """Wait until the broker has ended the connection; return why, as the client says it."""


class Broker:
    """A Martlet, and what an administrator asks it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        (folder / "jwks.json").write_text(json.dumps({"keys": [jwk("e")]}))
        settings = {
            "plugins.enabled": '["nameserver", "remoting", "mqtt", "stomp", "acl"]',
            "mqtt.tls_cert": json.dumps(str(folder / "server.pem")),
            "acl.jwks": json.dumps(str(folder / "jwks.json")),
            "acl.token_issuer": json.dumps(CLAIMS["iss"]),
            "acl.token_audience": json.dumps(CLAIMS["aud"]),
        }
        self.martlet = acl_martlet(folder, settings)
        self._socket = folder / "data" / NAME
        self.martlet.process.wait_until(lambda: self._socket.is_socket() or None, "the socket of the plugin acl")
        self.tell("put rule", subject="everybody", decision="allow", actions=["all"], resource="*")

    def tell(self, request: str, **fields: object) -> None:
        """Ask what `martlet acl` asks; it is in effect then."""
        with connect_unix(str(self._socket), PATIENCE_S) as connection:
            connection.sendall(json.dumps({"request": request, **fields}).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline())
        assert "error" not in answer, answer

    def settings(self, user: str = ROOT["access_key"], secret: str = ROOT["secret_key"]) -> ClientSettings:
        key = SigningKey(user, secret)
        return ClientSettings(
            self.martlet.name_server, request_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S, signing_key=key
        )

    def stored(self, topic: str) -> set[str]:
        """Return the bodies in the topic of a case, or under its name in the topic of MQTT."""
        bodies: set[str] = set()
        with PullConsumer(self.settings(), "reader") as consumer:
            for name in (topic, "mqtt"):
                with suppress(MartletError):  # nobody has sent to it
                    for queue in consumer.queues(name):
                        bodies |= {each.body.decode() for each in consumer.read(queue, 0)}
        return {body for body in bodies if body.startswith(f"{topic} ")}


# clients that log in


class LoggedIn:
    """A client of MQTT or STOMP."""

    def __init__(self, send: Callable[[str], None], wait_end: Callable[[], str]) -> None:
        self.send, self.wait_end = send, wait_end


class Clients:
    """Makes clients, and ends them."""

    def __init__(self, broker: Broker, jvms: Callable[[str], Jvm], folder: Path) -> None:
        self._broker, self._jvms, self._folder = broker, jvms, folder
        self._ended = ExitStack()
        self._made: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the library or program *name*, which all tests share."""
        if name not in self._made:
            made = self._made[name] = make()
            self._ended.callback(made.stop if hasattr(made, "stop") else made.close)
        return self._made[name]

    def close(self) -> None:
        self._ended.close()
        CONNECTIONS.close()

    def connect(self, client: str, user: str, secret: str, topic: str) -> Client:
        """Return a client that has logged in, or will sign. Raises `Refused`."""
        if client in SIGNERS:
            if client == "java":
                return Signer(self._java(user, secret, topic))
            return Signer(lambda text: getattr(self, f"_send_by_{client}")(user, secret, topic, text))
        try:
            made = self._mqtt(client, user, secret, topic) if "stomp" not in client else None
            return made or self._stomp(client, user, secret, topic)
        except (mqtt_clients.LoginRefused, stomp_clients.LoginRefused) as error:
            raise Refused(str(error).rpartition("}: ")[2]) from error  # what comes before is the test's own

    def _mqtt(self, client: str, user: str, secret: str, topic: str) -> Client:
        clients = self._once(
            client,
            lambda: (
                mqtt_clients.PahoClients()
                if client.startswith("paho")
                else mqtt_clients.Steered(mqtt_clients.node_words(), self._folder / "mqtt")
            ),
        )
        has_tls = client == "paho"
        link = mqtt_clients.Link(
            f"{'mqtts' if has_tls else 'mqtt'}://{self._broker.martlet.mqtt}",
            4 if client == "paho-3" else 5,
            self._broker.ca if has_tls else None,
            user,
            secret,
        )
        made = clients.connect(link, f"{topic}-client")
        return LoggedIn(lambda text: made.publish(mqtt_clients.Message(f"{topic}/door", text.encode())), made.wait_end)

    def _stomp(self, client: str, user: str, secret: str, topic: str) -> Client:
        clients = self._once(
            client,
            lambda: (
                stomp_clients.StompPyClients("1.2")
                if client == "stomp.py"
                else stomp_clients.Steered(stomp_clients.node_words(), self._folder / "stomp", reconnects=True)
            ),
        )
        made = clients.connect(self._broker.martlet.stomp, (0, 0), login=user, passcode=secret)

        def wait_end() -> str:
            text = str(made.heard.wait(lambda heard: heard.errors or None)[0][0])
            if isinstance(made, stomp_clients.SteeredClient):
                made.forget()  # it would log in again and again
            return text

        return LoggedIn(lambda text: made.send(f"/topic/{topic}", text), wait_end)

    # clients that sign each request

    def _java(self, user: str, secret: str, topic: str) -> Callable[[str], None]:
        java = self._once("java", lambda: Java(self._jvms(fetch.CLIENT_VERSIONS[-1]), self._broker.martlet.name_server))
        group = f"producer-{next(self._numbers)}"
        producer = java.producer(group, retries=0, access_key=user, secret_key=secret)

        def send(text: str) -> None:
            try:
                producer.send(message(topic, text))
            except Failed as error:
                raise Refused(str(error)) from error

        return send

    def _send_by_python(self, user: str, secret: str, topic: str, text: str) -> None:
        try:
            with Producer(self._broker.settings(user, secret), "python") as producer:
                producer.send(Message(topic, text.encode()))
        except MartletError as error:
            raise Refused(str(error)) from error

    def _send_by_spark(self, user: str, secret: str, topic: str, text: str) -> None:
        (self._folder / "secret").write_text(secret)
        options = {"endpoints": self._broker.martlet.name_server, "topic": topic, "guarantee": "at-least-once"}
        options |= {"accessKey": user, "secretKey": f"file:{self._folder / 'secret'}"}
        try:
            writer = MartletDataSource(options).writer(SCHEMA, overwrite=False)
            writer.write(iter([pa.RecordBatch.from_pydict({"body": pa.array([text])})]))
        except SparkConnectorError as error:
            raise Refused(str(error)) from error
        finally:
            CONNECTIONS.close()

    def _send_by(self, language: str, words: list[str], user: str, secret: str, topic: str, text: str) -> None:
        program = self._once(language, lambda: Program(words, self._folder / language))
        made = send_words(language, self._broker.martlet.name_server, "sync", message(topic, text))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("INTEROP_ACCESS_KEY", user)
            patch.setenv("INTEROP_SECRET_KEY", secret)
            run = program.start(*made)
        if run.child.wait(PATIENCE_S):
            raise Refused(run.complaints.read_text())

    def _send_by_go(self, *case: str) -> None:
        self._send_by("go", [str(fetch.go_program())], *case)

    def _send_by_cpp(self, *case: str) -> None:
        self._send_by("cpp", [str(fetch.cpp_python()), str(fetch.HERE / "cpp" / "client.py")], *case)

    def _send_by_node(self, *case: str) -> None:
        self._send_by("node", fetch.node_program("node", fetch.HERE / "node" / "client.js"), *case)


class Signer:
    """A client without a login."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send

    def wait_end(self) -> str:
        """Return why the next request is refused."""
        with pytest.raises(Refused) as refused:
            self.send("after the end")
        return str(refused.value)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    found = Broker(tmp_path_factory.mktemp("credentials"))
    yield found
    found.martlet.close()


@pytest.fixture(scope="module")
def clients(broker: Broker, jvms: Callable[[str], Jvm], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    found = Clients(broker, jvms, tmp_path_factory.mktemp("clients"))
    yield found
    found.close()


class Case:
    """One user with a topic, and one kind of client."""

    def __init__(self, broker: Broker, clients: Clients, client: str, number: int) -> None:
        self.broker, self._clients, self.client = broker, clients, client
        self.user = self.topic = f"user{number}"
        self.signs = client in SIGNERS
        broker.tell("add user", name=self.user, password=None if self.signs else "the first")
        if self.signs:
            broker.tell("put key", user=self.user, key=self.user, secret="the first")
            with Admin(broker.settings()) as admin:
                admin.create_topic(self.topic, queues=1)

    def connect(self, secret: str, user: str = "") -> Client:
        return self._clients.connect(self.client, user or self.user, secret, self.topic)

    def text(self, word: str) -> str:
        return f"{self.topic} {word}"

    def refused(self, secret: str, user: str = "") -> str:
        """Return why a client with *secret* sends nothing."""
        with pytest.raises(Refused) as refused:
            self.connect(secret, user).send(self.text("refused"))
        return str(refused.value)

    def token(self, seconds: int) -> str:
        claims = {**CLAIMS, "sub": self.user, "exp": int(time.time()) + seconds}
        algorithm, private = PRIVATE["e"]
        return jwt.encode(claims, private, algorithm, headers={"kid": "e"})


def check_right(case: Case) -> list[str]:
    case.connect("the first").send(case.text("right"))
    assert case.broker.stored(case.topic) == {case.text("right")}
    return []


def check_wrong(case: Case) -> list[str]:
    refused = [case.refused("a guess"), case.refused("the first", "nobody")]
    assert case.broker.stored(case.topic) == set()
    return refused


def check_rotated(case: Case) -> list[str]:
    """A new password ends connections; a further key does not, and both count until the old one is removed."""
    held = case.connect("the first")
    held.send(case.text("old"))
    if case.signs:
        case.broker.tell("put key", user=case.user, key=f"{case.user}-2", secret="the second")
        held.send(case.text("still"))
        case.connect("the second", f"{case.user}-2").send(case.text("new"))
        case.broker.tell("remove key", key=case.user)
    else:
        case.broker.tell("set user", name=case.user, password="the second")
    check_end(case, held)
    refused = [case.refused("the first")]
    case.connect("the second", f"{case.user}-2" if case.signs else "").send(case.text("newest"))
    words = ("old", "still", "new", "newest") if case.signs else ("old", "newest")
    assert case.broker.stored(case.topic) == set(map(case.text, words))
    return refused


def check_disabled(case: Case) -> list[str]:
    held = case.connect("the first")
    case.broker.tell("set user", name=case.user, disabled=True)
    check_end(case, held)
    refused = [case.refused("the first")]
    assert case.broker.stored(case.topic) == set()
    return refused


def check_expired(case: Case) -> list[str]:
    case.connect(case.token(3600), "jwt").send(case.text("in time"))
    refused = [case.refused(case.token(-3600), "jwt")]
    assert case.broker.stored(case.topic) == {case.text("in time")}
    return refused


def check_end(case: Case, held: Client) -> None:
    wanted = SIGNERS[case.client] if case.signs else LOGINS[case.client][1]
    assert re.search(wanted, held.wait_end())


CHECKS: Final = {
    "right": check_right,
    "wrong": check_wrong,
    "rotated": check_rotated,
    "disabled": check_disabled,
    "expired": check_expired,
}


@pytest.mark.parametrize(("client", "credential"), CASES)
def test_a_client_is_served_with_what_is_valid_now_and_told_why_it_is_not(
    broker: Broker, clients: Clients, client: str, credential: str
) -> None:
    case = Case(broker, clients, client, CASES.index((client, credential)))
    wanted = SIGNERS[client] if client in SIGNERS else LOGINS[client][0]
    for said in CHECKS[credential](case):
        assert re.search(wanted, said), said
        assert "the first" not in said


PAGE: Final = (Path(__file__).parents[2] / "docs" / "acl.md").read_text()
JAVA: Final = """
import org.apache.rocketmq.acl.common.*;
import org.apache.rocketmq.client.producer.*;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.remoting.RPCHook;

public class Page {
    public static void main(String[] words) throws Exception {
        String secret = words[1];
        %s
        producer.setNamesrvAddr(words[0]);
        producer.start();
        producer.send(new Message("page", "page works".getBytes()), 120000);
        System.exit(0);
    }
}
"""


def test_the_pages_java_client_is_served(broker: Broker, tmp_path: Path) -> None:
    broker.tell("add user", name="alice")
    broker.tell("put key", user="alice", key="alice", secret="the secret")
    [snippet] = re.findall(r"```java\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "Page.java").write_text(JAVA % snippet)
    words = [fetch.tool("java"), f"-Duser.home={tmp_path}", "-cp", f"{fetch.client_jars('5.5.0')}/*"]
    words += [str(tmp_path / "Page.java"), broker.martlet.name_server, "the secret"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert broker.stored("page") == {"page works"}
