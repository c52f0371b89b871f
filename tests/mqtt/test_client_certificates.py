"""Who a client is by its certificate, alone and with a user name and a password."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from ssl import SSLContext

import pytest
import trio
import trustme
from tests.mqtt.mqtt_talk import ASYNC, V5, Talk
from tests.mqtt.users import Users

from martlet.contracts import Identity
from martlet.net.addresses import split_address
from martlet.net.tls import client_context
from martlet.testing.peers import serving
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_mqtt.shared.context import Context
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect


class Stream:
    """A TLS connection, as `Talk` uses it."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self._rest = b""

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive_exactly(self, size: int) -> bytes:
        while len(self._rest) < size:
            data = await self._stream.receive_some()
            if not data:
                raise EOFError
            self._rest += data
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def close(self) -> None:
        self._stream.transport_stream.socket.close()


class Port:
    """A port that asks for certificates; ann, bob and mallory have one, and the users know ann and bob."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self.address = ""
        files = {name: str(directory / f"{name}.pem") for name in ("server", "ca")}
        self._authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(files["server"])
        self._authority.cert_pem.write_to_path(files["ca"])
        self.ca = files["ca"]
        self.config = MqttConfig(
            listen="127.0.0.1:0", tls="enforcing", tls_cert=files["server"], tls_client_ca=files["ca"]
        )

    def bound(self, address: str) -> None:
        self.address = address

    def _context_of(self, name: str) -> SSLContext:
        path = self._directory / f"{name}.pem"
        self._authority.issue_cert(common_name=name).private_key_and_cert_chain_pem.write_to_path(str(path))
        context = client_context(self.ca, str(path))
        context.check_hostname = False
        return context

    @asynccontextmanager
    async def answer(self, certificate: str, user: str | None, password: bytes | None) -> AsyncIterator[Connack]:
        stream = await trio.open_tcp_stream(*split_address(self.address))
        tls = trio.SSLStream(stream, self._context_of(certificate))
        talk = Talk(Stream(tls), V5)
        await talk.send(Connect("c", V5, user_name=user, password=password))
        yield await talk.expect(Connack)
        await stream.aclose()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Port, Context]]:
    port, users = Port(tmp_path), Users(tmp_path)
    users.write(ann="read mqtt/#", bob="read mqtt/#")
    plugin = MqttPlugin(port.config)
    async with serving(
        tmp_path / "data",
        store=ASYNC,
        projections=plugin.martlet_projections,
        ports=lambda broker: (plugin.protocol(broker, port.bound),),
    ) as running:
        users.install_in(running.broker)
        yield port, plugin.context(running.broker)


@pytest.mark.parametrize(
    ("certificate", "user", "password", "expected"),
    [
        ("ann", None, None, "ann"),
        ("ann", "ann", None, "ann"),  # a name without a password proves nothing more
        ("ann", "bob", b"bob", "bob"),  # the password decides
        ("ann", "ann", b"ann", "ann"),
        ("mallory", None, None, ""),  # nobody knows it
        ("mallory", "ann", b"ann", "ann"),
    ],
)
async def test_a_certificate_counts_if_there_is_no_password(
    served: tuple[Port, Context], certificate: str, user: str | None, password: bytes | None, expected: str
) -> None:
    port, context = served
    async with port.answer(certificate, user, password) as answer:
        assert answer.reason == ReasonCode.SUCCESS
        assert context.clients["c"].identity == Identity(expected)


@pytest.mark.parametrize(
    ("certificate", "user", "password"),
    [("ann", "bob", None), ("ann", "ann", b"a guess"), ("mallory", "ann", None), ("ann", None, b"ann")],
)
async def test_a_wrong_user_name_or_password_is_refused_whatever_the_certificate_says(
    served: tuple[Port, Context], certificate: str, user: str | None, password: bytes | None
) -> None:
    port, context = served
    async with port.answer(certificate, user, password) as answer:
        assert answer.reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD
        assert not context.clients
