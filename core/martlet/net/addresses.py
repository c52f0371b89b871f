"""Addresses in the configuration, in logs and in records."""

from socket import AF_INET, AF_INET6, inet_pton

from martlet.errors import ConfigError

__all__ = ["check_address", "pack_host", "show_address", "split_address"]


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


def pack_host(host: str, port: int) -> bytes:
    """Return the format of records: 4 or 16 address bytes and an i32 port, big-endian.

    Raises:
      OSError: *host* is a name.
    """
    return inet_pton(AF_INET6 if ":" in host else AF_INET, host) + port.to_bytes(4, "big")


def show_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
