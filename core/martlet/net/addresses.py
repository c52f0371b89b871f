"""Addresses in the configuration, in logs and in records."""

from socket import AF_INET, AF_INET6, inet_pton
from typing import Final

from martlet.errors import ConfigError

__all__ = [
    "check_address",
    "check_listen",
    "is_loopback",
    "pack_host",
    "plain_host",
    "show_address",
    "split_address",
    "split_listen",
]

# Prefix of an IPv4 client's address on an IPv6 socket (RFC 4291 section 2.5.5.2).
MAPPED: Final = "::ffff:"


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 host is in brackets.

    Raises:
      ConfigError: *text* is not ``HOST:PORT``.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"address {text!r} is not HOST:PORT; for example 127.0.0.1:10911 or [::1]:10911")
    return host.strip("[]"), int(port)


def check_address(key: str, text: str) -> None:
    """Raise `ConfigError` unless *text*, the value of configuration key *key*, is ``HOST:PORT``."""
    try:
        split_address(text)
    except ConfigError as error:
        raise ConfigError(f"config key {key!r}: {error}") from error


def split_listen(text: str) -> list[tuple[str, int]]:
    """Return the hosts and ports in *text*: one ``HOST:PORT``, or several separated by commas.

    Raises:
      ConfigError: an address is not ``HOST:PORT``.
    """
    return [split_address(each.strip()) for each in text.split(",")]


def check_listen(key: str, text: str) -> None:
    """Raise `ConfigError` unless `split_listen` accepts *text*, the value of configuration key *key*."""
    try:
        addresses = split_listen(text)
    except ConfigError as error:
        raise ConfigError(f"config key {key!r}: {error}") from error
    for address in addresses:
        if address[1] and addresses.count(address) > 1:
            raise ConfigError(f"config key {key!r} has {show_address(*address)} twice; leave one out")


def plain_host(host: str) -> str:
    """Return a client's address *host*; an IPv4 address that IPv6 shows as ``::ffff:...`` without the prefix."""
    return host.removeprefix(MAPPED) if host.startswith(MAPPED) and "." in host else host


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to the address *host* of a socket."""
    return host.startswith("127.") or host == "::1"


def pack_host(host: str, port: int) -> bytes:
    """Return the format of records: 4 or 16 address bytes and an i32 port, big-endian.

    Raises:
      OSError: *host* is a name.
    """
    return inet_pton(AF_INET6 if ":" in host else AF_INET, host) + port.to_bytes(4, "big")


def show_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
