"""The TLS keys of a port, and the contexts made from them: reloadable, for servers and for clients."""

import logging
import math
import ssl
from collections.abc import Awaitable, Callable
from typing import Final, Literal, final

import trio

from martlet.config import Settings, setting
from martlet.errors import ConfigError
from martlet.net.certificates import self_signed
from martlet.net.certificates.expiry import certificate_end_ms

__all__ = ["Tls", "TlsConfig", "client_context"]

log = logging.getLogger("martlet.tls")

# Seconds until the broker tries again to make a certificate after a failure, if a client asks for TLS.
MAKE_AGAIN_S: Final = 60
VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class TlsConfig(Settings):
    """The keys of a port with TLS; plugins with such a port derive their configuration from this class."""

    tls: Literal["disabled", "permissive", "enforcing"] = setting(
        "permissive", "TLS refused, TLS and plain text on the same port, or TLS only, which needs tls_cert"
    )
    tls_cert: str = setting(
        "",
        "PEM file with the certificate chain; empty: TLS with a certificate that the broker makes itself, "
        "which clients cannot verify, if martlet[tls] is installed",
    )
    tls_key: str = setting("", "PEM file with the private key; empty if tls_cert contains it")
    tls_client_ca: str = setting(
        "", "PEM file with the certificate authorities for client certificates; empty: clients need no certificate"
    )
    tls_client: Literal["required", "optional"] = setting(
        "required",
        "with tls_client_ca: clients without a certificate are refused, or let in",
    )
    tls_crl: str = setting(
        "", "PEM file with the revocation lists of the authorities in tls_client_ca; empty: none is checked"
    )
    tls_version_min: Literal["1.2", "1.3"] = setting("1.2", "the oldest version of TLS that a client may use")


@final
class Tls:
    """The TLS settings of a port, from the keys of configuration section *section*.

    If a reload fails, the old certificates stay in use. A permissive port without a certificate makes one for itself
    when the first client begins TLS, and keeps it in memory.
    """

    def __init__(self, config: TlsConfig, section: str) -> None:
        self._config = config
        self._section = section
        self._own = b""  # key and certificate that the broker made, as PEM
        self._making = trio.Lock()
        self._make_again_at = -math.inf
        self._end_ms = 0
        self._context = self._load()

    def context(self) -> ssl.SSLContext | None:
        """Return the context for a new connection; None if the port has no TLS, or no certificate yet (`make`)."""
        return self._context

    def certificate_end_ms(self) -> int:
        """Return when the certificate in ``tls_cert`` ends, in epoch milliseconds; 0 if there is none."""
        return self._end_ms

    @property
    def make(self) -> Callable[[], Awaitable[ssl.SSLContext | None]] | None:
        """The ``make_tls`` of a `Protocol`; None unless the port may need a certificate of its own."""
        return self._make if self._config.tls == "permissive" and not self._config.tls_cert else None

    async def _make(self) -> ssl.SSLContext | None:
        """Return the context with the port's own certificate, which is made if missing; None if making it failed."""
        async with self._making:
            if self._context is None and trio.current_time() >= self._make_again_at:
                try:
                    self._own = await trio.to_thread.run_sync(self_signed.make)
                    self._context = self._load()
                except ConfigError as error:
                    self._make_again_at = trio.current_time() + MAKE_AGAIN_S
                    text = "a client of %s began TLS, but %s.tls_cert names no certificate; %s"
                    log.warning(text, self._section, self._section, error)
                else:
                    text = "%s.tls_cert is empty, so clients of %s that begin TLS get a self-signed certificate made "
                    text += "for this run, with the SHA-256 fingerprint %s; it protects against eavesdropping, not "
                    text += "against an impostor"
                    log.info(text, self._section, self._section, self_signed.fingerprint(self._own))
        return self._context

    @property
    def required(self) -> bool:
        """Return whether plain text is refused."""
        return self._config.tls == "enforcing"

    def reload(self) -> None:
        """Reload the files, for new connections; the port's own certificate stays."""
        self._make_again_at = -math.inf
        try:
            self._context = self._load()
        except ConfigError as error:
            log.error("TLS certificates cannot be reloaded, keeping the old ones; %s", error)

    def _load(self) -> ssl.SSLContext | None:
        config = self._config
        if config.tls == "disabled":
            return None
        if not config.tls_cert and config.tls == "enforcing":
            raise ConfigError(
                f"{self._section}.tls is 'enforcing' and {self._section}.tls_cert is empty; name a certificate file"
            )
        if not config.tls_cert and not self._own:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[config.tls_version_min]
        end_ms = 0
        try:
            if config.tls_cert:
                # Refuse an encrypted key: OpenSSL would ask for its pass phrase on the terminal, and wait.
                context.load_cert_chain(config.tls_cert, config.tls_key or None, lambda: "")
                with open(config.tls_cert, encoding="ascii", errors="replace") as file:
                    end_ms = certificate_end_ms(file.read())
            else:
                self_signed.load(context, self._own)
        except (OSError, ssl.SSLError) as error:
            text = f"{self._section}.tls_cert {config.tls_cert!r} with tls_key {config.tls_key!r} cannot be used"
            raise ConfigError(f"{text}; {error}") from error
        if config.tls_client_ca:
            self._trust(context, "tls_client_ca", config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED if config.tls_client == "required" else ssl.CERT_OPTIONAL
        section = self._section
        if config.tls_crl:
            if not config.tls_client_ca:
                raise ConfigError(f"{section}.tls_crl has no effect without {section}.tls_client_ca; set it")
            self._trust(context, "tls_crl", config.tls_crl)
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
        self._end_ms = end_ms
        return context

    def _trust(self, context: ssl.SSLContext, key: str, path: str) -> None:
        """Load authorities or their revocation lists."""
        try:
            context.load_verify_locations(path)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{self._section}.{key} {path!r} cannot be used; {error}") from error


def client_context(ca: str = "", cert: str = "", key: str = "", *, verify: bool = True) -> ssl.SSLContext:
    """Return a client context that trusts *ca* (the system's authorities if empty) and presents *cert*.

    Raises:
      ConfigError: a file is missing or invalid.
    """
    if key and not cert:
        raise ConfigError(f"TLS key {key!r} has no certificate; set its certificate as well")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if ca else ssl.create_default_context()
    if ca:
        try:
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"TLS authority {ca!r} cannot be used; {_reason(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert:
        try:
            context.load_cert_chain(cert, key or None, lambda: "")
        except (OSError, ssl.SSLError) as error:
            text = f"TLS certificate {cert!r} with key {key or cert!r} cannot be used"
            raise ConfigError(f"{text}; {_reason(error)}") from error
    return context


def _reason(error: OSError) -> str:
    """Return the reason from OpenSSL or the system, without numbers."""
    if isinstance(error, ssl.SSLError):
        return f"not PEM, or certificate and key do not match ({error.reason or error})"
    return error.strerror or str(error)
