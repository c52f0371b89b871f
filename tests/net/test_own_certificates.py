"""A port in permissive mode without a certificate makes one for itself when the first client begins TLS."""

import logging
import os
import ssl
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import trio
import trustme
from tests.broker.toys import World, toy_server
from tests.net.test_server_sockets import dial

from martlet.config import fill
from martlet.errors import ConfigError
from martlet.net.certificates import self_signed
from martlet.net.tls import MAKE_AGAIN_S, Tls, TlsConfig, client_context

MISSING = (
    "a client of toys began TLS, but toys.tls_cert names no certificate; to have one made, "
    "install the package cryptography: pip install 'martlet[tls]'"
)
NO_LINE = b"\x16" + bytes(1100)  # begins as TLS does, and is too long for a line


def tls(**keys: object) -> Tls:
    return Tls(fill(TlsConfig, keys, "toys"), "toys")


@asynccontextmanager
async def serving(tls: Tls) -> AsyncGenerator[World]:
    world = World()
    protocol = world.protocol(tls=tls.context, tls_required=tls.required, make_tls=tls.make)
    async with toy_server(protocol=protocol, world=world):
        yield world


@asynccontextmanager
async def secured(
    world: World, context: ssl.SSLContext | None = None
) -> AsyncGenerator[trio.SSLStream[trio.SocketStream]]:
    context = context or client_context(verify=False)
    stream = trio.SSLStream(await dial(world), context, server_hostname="localhost", https_compatible=True)
    try:
        await stream.do_handshake()
        yield stream
    finally:
        await trio.aclose_forcefully(stream)


async def echo_by_tls(world: World, context: ssl.SSLContext | None = None) -> None:
    async with secured(world, context) as stream:
        await echo(stream)


async def echo(stream: trio.abc.Stream) -> None:
    await stream.send_all(b"echo hello\n")
    came = b""
    while not came.endswith(b"\n"):
        came += (data := await stream.receive_some(100))
        assert data
    assert came == b"hello\n"


def certificate_of(stream: trio.SSLStream[trio.SocketStream]) -> bytes:
    found = stream.getpeercert(binary_form=True)
    assert isinstance(found, bytes)
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the certificates that are made, by the thread that waits for each."""
    threads: list[str] = []
    make = self_signed.make

    def counted() -> bytes:
        threads.append(threading.current_thread().name)
        return make()

    monkeypatch.setattr(self_signed, "make", counted)
    return threads


@pytest.fixture
def without_cryptography(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cryptography.py").write_text("raise ImportError('No module named cryptography')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.parametrize("is_in_memory", [True, False])
async def test_the_first_clients_get_one_certificate_and_others_plain_text(
    is_in_memory: bool, made: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "martlet.tls")
    if not is_in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    own = tls()
    async with serving(own) as world, await dial(world) as plain:
        await echo(plain)
        assert made == []
        assert own.context() is None
        found: list[bytes] = []

        async def client() -> None:
            async with secured(world) as stream:
                await echo(stream)
                found.append(certificate_of(stream))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(client)
        await echo(plain)
        own.reload()
        await client()
    assert len(set(found)) == 1
    assert len(made) == 1
    assert made[0] != threading.main_thread().name
    digest = sha256(found[0]).digest().hex(":").upper()
    (line,) = [record for record in caplog.records if record.name == "martlet.tls"]
    assert line.levelno == logging.INFO
    assert line.getMessage() == (
        "toys.tls_cert is empty, so clients of toys that begin TLS get a self-signed certificate made for this run, "
        f"with the SHA-256 fingerprint {digest}; it protects against eavesdropping, not against an impostor"
    )


async def test_a_client_that_verifies_does_not_accept_it() -> None:
    async with serving(tls()) as world:
        with pytest.raises((trio.BrokenResourceError, ssl.SSLError)):
            await echo_by_tls(world, client_context())
        await echo_by_tls(world)


async def test_each_port_and_run_has_a_certificate_of_its_own() -> None:
    found = set()
    for _ in range(2):
        async with serving(tls()) as world, secured(world) as stream:
            found.add(certificate_of(stream))
    assert len(found) == 2


async def test_client_certificates_are_required_as_configured(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with serving(tls(tls_client_ca=str(tmp_path / "ca.pem"))) as world:
        known = client_context(verify=False)
        authority.issue_cert("somebody").configure_cert(known)
        await echo_by_tls(world, known)
        with pytest.raises((trio.BrokenResourceError, ssl.SSLError, AssertionError)):
            await echo_by_tls(world)


async def refused(world: World) -> None:
    """Begin TLS, and get what a client gets that does not speak the port's protocol."""
    async with await dial(world) as stream:
        await stream.send_all(NO_LINE)
        came = b"".join([data async for data in stream])
        assert came == b"error a line is over 1000 bytes\n"


@pytest.mark.usefixtures("without_cryptography")
async def test_without_the_package_a_line_says_what_to_install_and_clients_are_refused(
    made: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = tls()
    async with serving(own) as world, await dial(world) as plain:
        for _ in range(3):
            await refused(world)
        assert caplog.messages.count(MISSING) == len(made) == 1
        await echo(plain)
        monkeypatch.delenv("PYTHONPATH")  # the package is installed
        await refused(world)
        own.reload()
        await echo_by_tls(world)
        assert len(made) == 2


@pytest.mark.usefixtures("without_cryptography")
async def test_a_certificate_that_could_not_be_made_is_tried_again_later(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tls()
    assert own.make is not None
    assert await own.make() is None
    monkeypatch.delenv("PYTHONPATH")
    now = trio.current_time()
    monkeypatch.setattr(trio, "current_time", lambda: now + MAKE_AGAIN_S + 1)
    assert await own.make() is own.context() is not None
    assert len(made) == 2


@pytest.mark.parametrize(
    ("executable", "says"),
    [
        ("/nowhere/python", "the process that makes one failed; .*No such file"),
        ("/bin/false", "the process that makes one ended with exit code 1; "),
    ],
)
def test_a_process_that_fails_is_explained(executable: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ConfigError, match=says):
        self_signed.make()


async def test_a_client_may_leave_while_its_certificate_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, began, goes_on = self_signed.make, threading.Event(), threading.Event()

    def slow() -> bytes:
        began.set()
        goes_on.wait()
        return make()

    monkeypatch.setattr(self_signed, "make", slow)
    async with serving(tls()) as world:
        async with await dial(world) as stream:
            await stream.send_all(NO_LINE)
            await trio.to_thread.run_sync(began.wait)
        goes_on.set()
        await echo_by_tls(world)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_other_ports_make_none(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    for keys in ({"tls": "disabled"}, {"tls_cert": str(tmp_path / "both.pem")}):
        assert tls(**keys).make is None
    with pytest.raises(ConfigError, match="tls_cert is empty"):
        tls(tls="enforcing")
