"""A broker with the plugin in this process, and clients of all protocols that log in to it."""

import hmac
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio
from tests.remoting.conftest import send_ext
from tests.wire_clients.mqtt import MqttClient
from tests.wire_clients.remoting import RemotingClient, remoting_of
from tests.wire_clients.stomp import Frame, StompClient, connected

from martlet.app import saving
from martlet.broker import Broker
from martlet.contracts import Identity, Protocol, Service
from martlet.message import encode_properties
from martlet.state import Projection
from martlet.store import Disk
from martlet.testing.peers import Serving, serving
from martlet.testing.stores import small_config
from martlet_acl.administration import Administration
from martlet_acl.config import AclConfig
from martlet_acl.endpoint import Endpoint
from martlet_acl.files import POLICIES, SECRETS
from martlet_acl.passwords import hash_password
from martlet_acl.plugin import AclPlugin
from martlet_acl.state import AclState
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_stomp.config import StompConfig
from martlet_stomp.plugin import StompPlugin

SALT: Final = b"salt" * 4
ROOT: Final = Identity("root")
# Each user has such a password, and an access key with the own name and such a secret.
PASSWORD: Final = "password of {}"
SECRET: Final = "secret of {}"


def policy(*rules: str) -> list[dict[str, object]]:
    """Return stored rules of texts such as ``allow publish,get on topic:a``."""
    found: list[dict[str, object]] = []
    for rule in rules:
        decision, actions, _, resource = rule.split(" ")
        found.append({"resource": resource, "actions": actions.split(","), "decision": decision})
    return found


def secrets_of(*users: str) -> dict[str, object]:
    """Return the stored secrets of *users*."""
    found: dict[str, object] = {}
    for name in users:
        password = hash_password(PASSWORD.format(name).encode(), SALT)
        found[name] = {"password": password, "keys": {name: {"secret": SECRET.format(name)}}}
    return found


def write_files(directory: Path, users: Mapping[str, object], rules: Mapping[str, Sequence[str]], **more: Any) -> None:
    """Write the two files as a person does, without versions; *rules* are custom ones by subject."""
    (directory / "config").mkdir(parents=True, exist_ok=True)
    stored = {subject: {"custom": policy(*texts)} for subject, texts in rules.items()}
    document = {"users": users, "rules": stored, **more}
    (directory / POLICIES).write_text(json.dumps(document, indent=1))
    (directory / SECRETS).write_text(json.dumps({"users": secrets_of(*users)}))
    (directory / SECRETS).chmod(0o600)


class AclBroker:
    """A running broker and its plugin."""

    def __init__(self, running: Serving, plugin: AclPlugin, ports: Mapping[str, Protocol]) -> None:
        self.running = running
        self.broker: Broker = running.broker
        self.plugin = plugin
        self.ports = ports

    @property
    def administration(self) -> Administration:
        return self.plugin.administration

    @property
    def state(self) -> AclState:
        return self.plugin.state()

    # logins and sends; each returns whether the broker did what was asked

    async def mqtt_login(self, user: str | None, password: bytes | None, client_id: str = "") -> MqttClient | None:
        talk = MqttClient(self.running.connect(self.ports["mqtt"]), V5)
        await talk.send(Connect(client_id or f"of {user}", V5, True, user_name=user, password=password))
        answer = await talk.receive()
        assert isinstance(answer, Connack), answer
        if answer.reason == ReasonCode.SUCCESS:
            return talk
        assert answer.reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD, answer
        return None

    async def mqtt_publish(self, talk: MqttClient, name: str) -> bool:
        reason = await talk.publish(name, b"x", 1)
        assert reason in (ReasonCode.SUCCESS, ReasonCode.NO_MATCHING_SUBSCRIBERS, ReasonCode.NOT_AUTHORIZED)
        return reason != ReasonCode.NOT_AUTHORIZED

    async def stomp_login(self, user: str, password: str) -> tuple[StompClient, Frame] | None:
        talk, answer = await connected(self.running.connect(self.ports["stomp"]), login=user, passcode=password)
        if answer.command == "CONNECTED":
            return talk, answer
        assert answer.command == "ERROR", answer
        assert "password of" not in answer.body.decode() + str(answer.headers)
        return None

    def remoting(self) -> RemotingClient:
        return RemotingClient.of(self.running, self.ports["remoting"])

    async def remoting_send(self, talk: RemotingClient, topic: str, key: str = "", secret: str = "") -> Command:
        """Send one message, signed with *key* unless that is empty; return the answer."""
        return await talk.ask(
            RequestCode.SEND_MESSAGE_V2, signed(send_ext(topic, 0, PROPERTIES), b"x", key, secret), b"x"
        )


PROPERTIES: Final = encode_properties({"UNIQ_KEY": "K"}).decode()


def signed(ext: Mapping[str, object], body: bytes, key: str, secret: str) -> dict[str, object]:
    """Return *ext* with a signature, as RocketMQ's AclClientRPCHook makes it."""
    if not key:
        return dict(ext)
    fields = {**ext, "AccessKey": key}
    content = "".join(str(fields[name]) for name in sorted(fields)).encode() + body
    return {**fields, "Signature": b64encode(hmac.digest(secret.encode(), content, "sha1")).decode()}


def install(plugin: AclPlugin, broker: Broker) -> None:
    """Call the plugin's hooks, as a start does."""
    broker.capabilities = dict(plugin.martlet_capabilities(broker))
    broker.authentication.authenticators = tuple(plugin.martlet_authenticators(broker))
    broker.authentication.mechanisms = plugin.martlet_mechanisms(broker)
    broker.authorizers = tuple(plugin.martlet_authorizers(broker))
    broker.quotas.sources = tuple(plugin.martlet_quotas(broker))


def is_endpoint(service: Service) -> bool:
    """Whether *service* is the socket, which needs a real directory."""
    return isinstance(getattr(service, "__self__", None), Endpoint)


@asynccontextmanager
async def acl_broker(
    directory: Path, config: AclConfig | None = None, *, disk: Disk | None = None, protocols: bool = True
) -> AsyncIterator[AclBroker]:
    """Run a broker on *directory*, whose files are there."""
    plugin = AclPlugin(config or AclConfig(watch_s=0))
    mqtt, stomp = MqttPlugin(MqttConfig(listen="127.0.0.1:0")), StompPlugin(StompConfig(listen="127.0.0.1:0"))

    def projections(broker: Broker) -> Sequence[Projection]:
        install(plugin, broker)
        return mqtt.martlet_projections(broker) if protocols else ()

    def services(broker: Broker) -> Sequence[Service]:
        others = [*mqtt.martlet_services(broker), *stomp.martlet_services(broker)] if protocols else []
        own = [each for each in plugin.martlet_services(broker) if disk is None or not is_endpoint(each)]
        return [partial(saving.run, broker), *own, *others]

    store = small_config(flush="async", segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20)
    async with serving(directory, disk=disk, store=store, projections=projections, services=services) as running:
        ports = {}
        if protocols:
            broker = running.broker
            ports = {"mqtt": mqtt.protocol(broker), "stomp": stomp.protocol(broker), "remoting": remoting_of(broker)}
        while running.broker.saver is None:
            await trio.lowlevel.checkpoint()
        yield AclBroker(running, plugin, ports)
