"""Who comes with a client certificate is who the authenticators say, before its first byte is handled."""

import math
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from martlet.broker import Broker
from martlet.contracts import Certificate, Credentials, Handler, Identity, LoginOrigin, Peer, Protocol
from martlet.errors import Reason, Refused
from martlet.net.addresses import split_address
from martlet.net.tls import Tls, TlsConfig
from martlet.testing.peers import serving


class Lines:
    """Every read is an event."""

    buffered_bytes = 0

    def __init__(self) -> None:
        self._events: list[bytes] = []

    def receive_data(self, data: bytes, now: float) -> None:
        self._events.append(data)

    def events(self) -> Iterator[bytes]:
        while self._events:
            yield self._events.pop(0)

    def farewell(self, error: Exception) -> bytes:
        return f"BYE {error}".encode()

    def deadline(self) -> float:
        return math.inf

    def handle_timeout(self, now: float) -> None: ...


class Who:
    """Answers who the peer is."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def handle(self, event: bytes) -> None:
        self._peer.send(f"<{self._peer.identity.name}>".encode())

    def collect(self, budget_bytes: int) -> None: ...

    def refuse(self, answer: Any, reason: Exception) -> Any: ...

    def closed(self, reason: str) -> None: ...


class Port:
    """A port for TLS, and certificates for its clients."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        files = {name: str(directory / f"{name}.pem") for name in ("cert", "ca")}
        self.authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(files["cert"])
        self.authority.cert_pem.write_to_path(files["ca"])
        self.config = TlsConfig(tls_cert=files["cert"], tls_client_ca=files["ca"])
        self.address = ""

    def protocol(self, broker: Broker) -> Protocol:
        tls = Tls(self.config, "who")

        def handle(peer: Peer, connection: Any) -> Handler:
            return Who(peer)

        def bound(address: str) -> None:
            self.address = address

        return Protocol("who", "127.0.0.1:0", lambda now: Lines(), handle, tls.context, tls.required, bound)

    async def ask(self, common_name: str | None, *, tls: bool = True) -> str:
        """What the port answers to somebody with that certificate, None for one without a common name."""
        stream: trio.abc.Stream = await trio.open_tcp_stream(*split_address(self.address))
        if tls:
            context = ssl.create_default_context()
            self.authority.configure_trust(context)
            self.authority.issue_cert("client.example", common_name=common_name).configure_cert(context)
            stream = trio.SSLStream(stream, context, server_hostname="localhost")
        async with stream:
            await stream.send_all(b"?")
            return bytes(await stream.receive_some()).decode()


@asynccontextmanager
async def port(directory: Path) -> AsyncIterator[tuple[Port, Broker]]:
    made = Port(directory)
    async with serving(directory / "data", ports=lambda broker: [made.protocol(broker)]) as running:
        yield made, running.broker


def by_name(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
    if not isinstance(credentials, Certificate):
        return None
    if credentials.common_name == "mallory":
        raise Refused(Reason.CREDENTIALS, "mallory is not welcome")
    assert credentials.dns_names == ("client.example",)
    assert credentials.der
    return Identity(credentials.common_name) if credentials.common_name else None


@pytest.mark.parametrize(("common_name", "said"), [("ann", "<ann>"), (None, "<>")])
async def test_a_certificate_says_who_the_peer_is(tmp_path: Path, common_name: str | None, said: str) -> None:
    async with port(tmp_path) as (made, broker):
        broker.authentication.authenticators = (by_name,)
        assert await made.ask(common_name) == said
        assert await made.ask(common_name, tls=False) == "<>"


async def test_without_authenticators_a_certificate_says_nothing(tmp_path: Path) -> None:
    async with port(tmp_path) as (made, _):
        assert await made.ask("ann") == "<>"


async def test_a_refused_certificate_ends_the_connection_with_the_reason(tmp_path: Path) -> None:
    async with port(tmp_path) as (made, broker):
        broker.authentication.authenticators = (by_name,)
        assert await made.ask("mallory") == "BYE certificate of 'mallory' was refused; mallory is not welcome"
        assert await made.ask("ann") == "<ann>"
