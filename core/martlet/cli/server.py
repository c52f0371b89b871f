"""Options of commands that connect to a port of a broker, as a client of one protocol."""

import argparse
import os
import socket
import ssl
from typing import Any

from msgspec import Struct

from martlet.cli.outcome import Unreachable
from martlet.config import read_secret
from martlet.net.addresses import split_address
from martlet.net.tls import client_context

__all__ = ["ServerSettings", "add_server_options", "connect", "server_settings"]

TIMEOUT_S = 30.0


class ServerSettings(Struct, frozen=True):
    """The address of the server, and the user; *protocol* is its name in texts, such as ``MQTT``."""

    protocol: str
    host: str
    port: int
    timeout_s: float
    tls: ssl.SSLContext | None = None
    user: str | None = None
    password: bytes | None = None

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"


def add_server_options(parser: argparse.ArgumentParser, protocol: str, address: str) -> None:
    """Add the options to *parser*; *address* is the default one of *protocol*."""
    name = _variable(protocol)
    add = parser.add_argument_group(f"{protocol} connection options").add_argument
    add("--address", metavar="HOST:PORT", help=f"{protocol} port. Default: ${name}, else {address}")
    add("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="for each request; default %(default)g")
    add("--user", metavar="NAME", help=f"user name. Default: ${name}_USER, else none")
    add(
        "--password-file",
        metavar="FILE",
        help=f"file with the password. Default: the password itself is ${name}_PASSWORD",
    )
    add("--tls", action="store_true", help="encrypt the connection; implied by the other TLS options")
    add("--tls-ca", metavar="FILE", default="", help="trusted authorities (PEM). Default: the system's")
    add("--tls-cert", metavar="FILE", default="", help="client certificate (PEM)")
    add("--tls-key", metavar="FILE", default="", help="its private key (PEM). Default: in the same file")
    add("--tls-insecure", action="store_true", help="accept any server certificate")
    parser.set_defaults(protocol=protocol, default_address=address)


def server_settings(arguments: Any) -> ServerSettings:
    """Return the server settings from options and environment. Raises `ConfigError`."""
    name = _variable(arguments.protocol)
    host, port = split_address(arguments.address or os.environ.get(name) or arguments.default_address)
    user = arguments.user or os.environ.get(f"{name}_USER")
    password = os.environ.get(f"{name}_PASSWORD")
    if arguments.password_file:
        password = read_secret(arguments.password_file)
    tls = None
    if arguments.tls or arguments.tls_ca or arguments.tls_cert or arguments.tls_insecure:
        tls = client_context(arguments.tls_ca, arguments.tls_cert, arguments.tls_key, verify=not arguments.tls_insecure)
    data = password.encode() if user and password is not None else None
    return ServerSettings(arguments.protocol, host, port, arguments.timeout, tls, user, data)


def connect(settings: ServerSettings) -> socket.socket:
    """Return a connection. Raises `Unreachable`."""
    try:
        plain = socket.create_connection((settings.host, settings.port), settings.timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if settings.tls is None:
            return plain
        return settings.tls.wrap_socket(plain, server_hostname=settings.host)
    except OSError as error:
        text = f"{settings.protocol} broker {settings.where} cannot be reached"
        raise Unreachable(f"{text}; {error.strerror or error}; start one with `martlet run`") from error


def _variable(protocol: str) -> str:
    return f"MARTLET_{protocol.upper()}"
