"""A broker that knows its users: who signs with the right key is served, and others get RocketMQ's refusal.

Martlet runs with the plugin of examples/martlet-users, RocketMQ 5.5.0 with its authentication and authorization.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import trio
from tests.users_plugin import users_plugin

from martlet_client import Admin, BrokerError, ClientSettings, Message, Producer, RouteNotFound, SendFailed
from martlet_client.blocking import Admin as BlockingAdmin
from martlet_remoting.wire.signatures import SigningKey

from . import fetch, wire
from .conftest import RocketMQ
from .java import Failed, Java, Jvm, Queue, found, message
from .martlet_process import Martlet
from .other_clients import Program
from .process import Process, eventually
from .rocketmq import Broker, NameServer, brokers_known

ANN = {"access_key": "ann", "secret_key": "ann's secret"}  # may do everything
BOB = {"access_key": "bob", "secret_key": "bob's secret"}  # may do nothing
DORA = {"access_key": "dora", "secret_key": "dora's secret"}  # may read
MALLORY = {"access_key": "ann", "secret_key": "a guess"}
USERS = f"""
[users.ann]
signing_key = "{ANN["secret_key"]}"
rules = ["publish *", "read *", "manage *"]
[users.bob]
signing_key = "{BOB["secret_key"]}"
[users.dora]
signing_key = "{DORA["secret_key"]}"
rules = ["read *"]
"""
NO_PERMISSION = 16
NO_ROUTE = 10005  # of the Java client: the name server gives no route
Name = Callable[[str], str]


def key(user: Mapping[str, str]) -> SigningKey:
    return SigningKey(user["access_key"], user["secret_key"])


def closed_martlet(folder: Path, more: Mapping[str, str] | None = None) -> Martlet:
    """Start a broker that knows the users, with *more* settings."""
    folder.mkdir(exist_ok=True)
    (folder / "users.toml").write_text(USERS)
    settings = {
        "plugins.enabled": '["nameserver", "remoting", "users"]',
        "users.file": json.dumps(str(folder / "users.toml")),
        **(more or {}),
    }
    return Martlet(folder, settings, environment=users_plugin(folder))


def closed_settings() -> dict[str, str]:
    """The settings of a real broker that knows ann."""
    auth = "org.apache.rocketmq.auth"
    return {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{auth}.authentication.provider.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{auth}.authentication.provider.LocalAuthenticationMetadataProvider",
        "authorizationEnabled": "true",
        "authorizationProvider": f"{auth}.authorization.provider.DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{auth}.authorization.provider.LocalAuthorizationMetadataProvider",
        "initAuthenticationUser": json.dumps({"username": "ann", "password": ANN["secret_key"]}),
        "innerClientAuthenticationCredentials": json.dumps({"accessKey": "ann", "secretKey": ANN["secret_key"]}),
    }


@pytest.fixture(scope="module")
def target(
    target_kind: str, tmp_path_factory: pytest.TempPathFactory, jvms: Callable[[str], Jvm]
) -> Iterator[RocketMQ | Martlet]:
    """A broker that knows the users."""
    folder = tmp_path_factory.mktemp("users")
    if target_kind == "martlet":
        broker: RocketMQ | Martlet = closed_martlet(folder)
    else:
        broker = RocketMQ(folder, closed_settings())
        tool = Java(jvms(fetch.SERVER_VERSION), broker.name_server)
        for user in BOB, DORA:
            words = ("-u", user["access_key"], "-p", user["secret_key"], "-t", "Normal")
            assert "success" in tool.mqadmin("createUser", "-b", broker.address, *words, **ANN)
        rule = ("-s", "User:dora", "-r", "Topic:*", "-a", "Sub,Get", "-d", "Allow")
        assert "success" in tool.mqadmin("createAcl", "-b", broker.address, *rule, **ANN)
    yield broker
    broker.close()


def test_a_java_client_with_the_right_key_is_served(java: Java, target: RocketMQ | Martlet, name: Name) -> None:
    topic = name("signed")
    queries = java.queries(**ANN)
    queries.create_topic(topic, target.address, queues=1)
    producer = java.producer(**ANN)
    bodies = {f"message {i}".encode() for i in range(20)}
    producer.send(*(message(topic, body, keys="k", tags="t", properties={"ä": "ö"}) for body in sorted(bodies)))
    producer.send(*(message(topic, f"batch {i}") for i in range(3)), how="batch")
    bodies |= {f"batch {i}".encode() for i in range(3)}
    consumer = java.push(name("push"), topic, **ANN)
    assert {m.body for m in consumer.wait_bodies(bodies)} == bodies
    pulled = java.lite(name("lite"), topic, auto_commit=True, **ANN).poll_bodies(bodies)
    assert {m.body for m in pulled} == bodies
    assert eventually(lambda: found(lambda: queries.by_key(topic, "k")), 30)
    if java.jvm.version != "4.9.8":  # its tool takes no key but that of a file
        assert topic in java.mqadmin("topicList", **ANN)


@pytest.mark.parametrize("user", [MALLORY, BOB, {"access_key": "nobody", "secret_key": "x"}, {}])
def test_other_java_clients_are_refused(
    newest: Java, target: RocketMQ | Martlet, target_kind: str, name: Name, user: dict[str, str]
) -> None:
    """RocketMQ's name server tells routes to everybody; Martlet's does not, whatever the reason."""
    topic = name("closed")
    newest.queries(**ANN).create_topic(topic, target.address, queues=1)
    [sent] = newest.producer(name("group"), retries=0, **user).try_send(message(topic, "x"))
    assert sent.error is not None
    assert sent.error.code == (NO_ROUTE if target_kind == "martlet" else NO_PERMISSION)
    with pytest.raises(Failed) as refused:
        newest.queries(**user).create_topic(name("made"), target.address)
    assert refused.value.code == NO_PERMISSION
    with pytest.raises(Failed, match=r"broker\[martlet\] not exist" if target_kind == "martlet" else "Invoke Broker"):
        newest.queries(**user).offsets(newest.producer(**ANN).queues(topic)[0])
    assert newest.queries(**ANN).offsets(newest.producer(**ANN).queues(topic)[0])["max"] == 0


def test_a_java_client_that_may_only_read_gets_the_route_and_sends_nothing(
    newest: Java, target: RocketMQ | Martlet, name: Name
) -> None:
    topic = name("read")
    newest.queries(**ANN).create_topic(topic, target.address, queues=1)
    [sent] = newest.producer(name("group"), retries=0, **DORA).try_send(message(topic, "x"))
    assert sent.error is not None
    assert sent.error.code == NO_PERMISSION
    assert newest.queries(**DORA).offsets(newest.producer(**ANN).queues(topic)[0])["max"] == 0


@pytest.mark.parametrize("token", ["", "session"])
def test_a_go_client_with_the_right_key_is_served(
    go: Program,
    newest: Java,
    target: RocketMQ | Martlet,
    target_kind: str,
    name: Name,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
) -> None:
    """It signs its requests to the name server too, without the token that it sends with them."""
    if token and target_kind == "rocketmq":
        return  # RocketMQ 5 verifies the token as well, which this client does not sign
    topic = name("go")
    newest.queries(**ANN).create_topic(topic, target.address, queues=2)
    for variable, value in {"ACCESS_KEY": ANN["access_key"], "SECRET_KEY": ANN["secret_key"], "TOKEN": token}.items():
        monkeypatch.setenv(f"INTEROP_{variable}", value)
    sent = [line for line in go.run("produce", target.name_server, topic, "2") if line.get("how") == "sync"]
    assert [line["status"] for line in sent] == [0, 0]
    got = go.run("consume", target.name_server, name("group"), topic, "5", "*", "concurrent", "0")
    assert len({line.get("body") for line in got} - {None}) >= 5
    monkeypatch.setenv("INTEROP_SECRET_KEY", MALLORY["secret_key"])
    refused = go.start("produce", target.name_server, topic, "1")
    assert refused.child.wait(120) != 0


def test_brokers_prove_themselves_to_name_servers_of_either_kind(
    tmp_path: Path, jvms: Callable[[str], Jvm], name: Name
) -> None:
    """A real broker to Martlet's name server, which asks for it; a Martlet broker to a real one, which does not."""
    (tmp_path / "secret").write_text(ANN["secret_key"])
    (tmp_path / "secret").chmod(0o600)
    host, topic = closed_martlet(tmp_path / "host"), name("mixed")
    ended: list[Callable[[], object]] = [host.close]
    try:
        settings = {"brokerName": "real", **closed_settings()}
        real = Broker(tmp_path / "real", host.name_server, settings, key=key(ANN))
        ended.append(real.kill)
        known = brokers_known(host.name_server, key(ANN))
        assert {name: ids["0"] for name, ids in known.items()} == {"martlet": host.address, "real": real.address}
        clients = Java(jvms("5.5.0"), host.name_server)
        ended.append(clients.close)
        clients.queries(**ANN).create_topic(topic, real.address, queues=1)
        queue = Queue(topic, "real", 0)
        eventually(lambda: True if found(lambda: clients.producer(**ANN).queues(topic)) == [queue] else None)
        [sent] = clients.producer(**ANN).send(message(topic, "x"))
        assert sent.broker == "real"

        names = NameServer(tmp_path / "names")
        ended.append(names.process.kill)
        keys = {"nameservers": json.dumps([names.address]), "nameservers_key": "ann"}
        keys["nameservers_secret_file"] = json.dumps(str(tmp_path / "secret"))
        ours = Martlet(tmp_path / "ours", {"broker.name": "ours", **{f"remoting.{k}": v for k, v in keys.items()}})
        ended.append(ours.close)
        eventually(lambda: True if brokers_known(names.address).keys() == {"ours"} else None)
        assert ours.stop() == 0
        assert brokers_known(names.address) == {}
    finally:
        for end in reversed(ended):
            end()


SEND = {
    "producerGroup": "P",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "1",
    "sysFlag": "0",
    "bornTimestamp": "1",
}


@pytest.mark.parametrize(
    ("who", "real", "ours"),
    [
        ("wrong secret", "check signature failed.", "access key 'ann' or the signature is wrong"),
        ("stranger", "User:nobody is not found.", "access key 'nobody' or the signature is wrong"),
        ("no signature", "check signature failed.", "access key 'ann' or the signature is wrong"),
        ("nobody", "username cannot be null.", "'' may not publish to topic[T]"),
        ("bob", "has no permission to access Topic:T", "'bob' may not publish to topic[T]"),
    ],
)
def test_the_code_is_rocketmqs_and_the_remark_says_why(
    target: RocketMQ | Martlet, target_kind: str, who: str, real: str, ours: str
) -> None:
    fields: dict[str, object] = {**SEND, "topic": "T", "queueId": "0", "flag": "0", "properties": ""}
    keys = {"wrong secret": key(MALLORY), "stranger": SigningKey("nobody", "x"), "bob": key(BOB)}
    if who in keys:
        fields = keys[who].sign(wire.SEND_MESSAGE, fields, b"x")
    elif who == "no signature":
        fields["AccessKey"] = "ann"
    said = {name: str(value) for name, value in fields.items()}
    answer = wire.ask(target.address, wire.SEND_MESSAGE, said, b"x")
    assert answer is not None
    assert answer.code == NO_PERMISSION
    assert (real if target_kind == "rocketmq" else ours) in answer.remark


def test_the_python_client_signs(target: RocketMQ | Martlet, target_kind: str, name: Name) -> None:
    topic = name("python")

    def settings(user: SigningKey | None) -> ClientSettings:
        return ClientSettings(target.name_server, request_timeout_s=60, connect_timeout_s=60, signing_key=user)

    async def talk() -> None:
        async with Admin(settings(key(ANN))) as admin:
            await admin.create_topic(topic, queues=1)
        async with Producer(settings(key(ANN)), name("group")) as producer:
            await producer.send(Message(topic, "größe".encode(), properties={"ä": "ö"}))
        for wrong in (key(MALLORY), key(BOB), None):
            async with Producer(settings(wrong), name("group")) as producer:
                with pytest.raises((BrokerError, RouteNotFound, SendFailed)) as refused:
                    await producer.send(Message(topic, b"x"))
            hides = target_kind == "martlet" and wrong != key(MALLORY)
            assert ("has no route" if hides else "NO_PERMISSION") in str(refused.value)

    trio.run(talk)
    with BlockingAdmin(settings(key(ANN))) as admin:
        assert topic in admin.topics()


def test_commands_sign_with_the_secret_in_a_file(
    target: RocketMQ | Martlet, target_kind: str, tmp_path: Path, name: Name
) -> None:
    (tmp_path / "secret").write_text(ANN["secret_key"] + "\n")
    environment = {"MARTLET_ACCESS_KEY": "ann", "MARTLET_SECRET_FILE": str(tmp_path / "secret")}
    topic = name("cli")

    def run(environment: Mapping[str, str], *words: str) -> tuple[int, str]:
        log = tmp_path / f"log{len(list(tmp_path.iterdir()))}"
        command = [sys.executable, "-m", "martlet", *words, "-n", target.name_server]
        process = Process(command, log, environment)
        code = process.child.wait(120)
        return code, process.output()

    assert run(environment, "topic", "create", topic, "--queues", "1")[0] == 0
    assert run(environment, "send", topic, "hello")[0] == 0
    code, said = run(environment, "topic", "list")
    assert code == 0
    assert topic in said
    code, said = run({}, "send", topic, "hello")
    assert code == 1
    assert ("has no route" if target_kind == "martlet" else "NO_PERMISSION") in said
    code, said = run({**environment, "MARTLET_ACCESS_KEY": "bob"}, "send", topic, "hello")
    assert code == 1
    assert "NO_PERMISSION" in said
