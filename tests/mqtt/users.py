"""Brokers that know users and their rules, for the tests of MQTT, and the client's side of SCRAM."""

import hashlib
import hmac
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.wire_clients.mqtt import MqttBroker, mqtt_broker

from martlet.broker import Broker

if TYPE_CHECKING:
    from martlet_users import UsersPlugin

SALT = b"salt" * 4


class Users:
    """The file of users; `write` is followed by what SIGHUP does, but ends no connection of users who are gone."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "users.toml"
        self._broker: Broker | None = None
        self._plugin: UsersPlugin | None = None

    def write(self, **users: str) -> None:
        """Give each of *users* these rules; everybody has the own name as password, for SCRAM as well."""
        from martlet_users import hash_password  # whoever only reads the marks of the tests has no example plugins
        from martlet_users.scram import ITERATIONS_MIN, make_secret

        text = ""
        for name, rules in users.items():
            text += f"[users.{name}]\n" if name != "anonymous" else "[anonymous]\n"
            if name != "anonymous":
                text += f'password = "{hash_password(name.encode(), SALT)}"\n'
                text += f'scram = "{make_secret(name, SALT, ITERATIONS_MIN)}"\ncertificate = true\n'
            text += f"rules = {[each.strip() for each in rules.split(';') if each.strip()]}\n"
        self._path.write_text(text)
        if self._plugin is not None and self._broker is not None:
            self._plugin.users.read_again()
            self._broker.rules.changed()

    def install(self, broker: Broker) -> None:
        """Have *broker* ask the plugin."""
        from martlet_users import UsersConfig, UsersPlugin

        self._broker = broker
        self._plugin = plugin = UsersPlugin(UsersConfig(str(self._path)))
        broker.authentication.authenticators = tuple(plugin.martlet_authenticators(broker))
        broker.authentication.mechanisms = plugin.martlet_mechanisms(broker)
        broker.authorizers = tuple(plugin.martlet_authorizers(broker))


@asynccontextmanager
async def closed_broker(
    directory: Path, *, options: Any = None, **users: str
) -> AsyncIterator[tuple[MqttBroker, Users]]:
    """A broker on which *users* have these rules, separated by semicolons."""
    found = Users(directory)
    found.write(**users)
    async with mqtt_broker(directory / "data", **(options or {})) as running:
        found.install(running.broker)
        yield running, found


class ScramClient:
    """The client's side of SCRAM-SHA-256 (RFC 5802 section 3)."""

    def __init__(self, user: str, password: str, nonce: str = "client's") -> None:
        self._password = password.encode()
        self._bare = f"n={user},r={nonce}"
        self._server_signature = b""
        self.first = f"n,,{self._bare}".encode()

    def final(self, challenge: bytes) -> bytes:
        """Return the last message after the broker's *challenge*."""
        fields = dict(field.split("=", 1) for field in challenge.decode().split(","))
        salted = hashlib.pbkdf2_hmac("sha256", self._password, b64decode(fields["s"]), int(fields["i"]))
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        without_proof = f"c=biws,r={fields['r']}"
        message = f"{self._bare},{challenge.decode()},{without_proof}".encode()
        signature = hmac.digest(hashlib.sha256(client_key).digest(), message, "sha256")
        proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
        self._server_signature = hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), message, "sha256")
        return f"{without_proof},p={b64encode(proof).decode()}".encode()

    def check(self, final: bytes) -> None:
        """Check that the broker knows the password's hash as well."""
        assert final == b"v=" + b64encode(self._server_signature)
