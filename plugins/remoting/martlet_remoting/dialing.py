"""Opens outgoing connections, with TLS if configured, and explains failures."""

import logging
import os
import ssl
from typing import Final, final

import trio

from martlet.errors import ConfigError
from martlet.net.tls import client_context
from martlet_remoting.config import RemotingConfig

__all__ = ["NameServerDialer", "encrypted", "why_not_opened"]

log = logging.getLogger("martlet.tls")

KEYS: Final = ("nameservers_tls_ca", "nameservers_tls_cert", "nameservers_tls_key", "nameservers_tls_insecure")


@final
class NameServerDialer:
    """Connects to remote name servers, with TLS if configured.

    Raises:
      ConfigError: a configured TLS file is missing or invalid.
    """

    def __init__(self, config: RemotingConfig) -> None:
        self._config = config
        self._context = self._load()

    def _load(self) -> ssl.SSLContext | None:
        config = self._config
        if not config.nameservers_tls and not any(getattr(config, key) for key in KEYS):
            return None
        try:
            return client_context(
                config.nameservers_tls_ca,
                config.nameservers_tls_cert,
                config.nameservers_tls_key,
                verify=not config.nameservers_tls_insecure,
            )
        except ConfigError as error:
            raise ConfigError(f"remoting.nameservers_tls: {error}") from error

    def reload(self) -> None:
        """Reload the TLS files, for new connections."""
        try:
            self._context = self._load()
        except ConfigError as error:
            log.error("TLS files for name servers cannot be reloaded, keeping the old ones; %s", error)

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(host, port)
        return stream if self._context is None else await encrypted(stream, self._context, host)


async def encrypted(stream: trio.abc.Stream, context: ssl.SSLContext, host: str) -> trio.abc.Stream:
    """Return *stream* to *host*, encrypted after a TLS handshake. Closes *stream* on failure."""
    outer = trio.SSLStream(stream, context, server_hostname=host)
    try:
        await outer.do_handshake()
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(outer)
        raise
    return outer


def why_not_opened(error: Exception) -> str:
    """Return the reason why a connection could not be opened; trio puts the TLS error into the cause."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate was rejected: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
        return f"TLS failed: {cause.reason or cause}"
    if isinstance(error, trio.BrokenResourceError):
        return "the peer ended the TLS handshake; it may not speak TLS, or may reject the client's certificate"
    if isinstance(cause, BaseExceptionGroup):  # one error for each address of the host
        return "; ".join(dict.fromkeys(_text(each) for each in cause.exceptions))
    return _text(error) or "no answer in time"


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
