"""Authentication: turns credentials into an identity.

The authenticators of the plugins are called in order. The first one that does not abstain decides: it returns an
identity or refuses. A password is checked in a worker thread, because a good password hash takes tens of milliseconds
by design; other credentials are checked on the event loop.

A mechanism authenticates in several steps, as SASL's do (RFC 4422). A protocol with such exchanges begins one by the
mechanism's name, and passes data between client and exchange.
"""

from collections.abc import Mapping
from typing import Final, final

import trio

from martlet.contracts import (
    ANONYMOUS,
    Authenticator,
    Certificate,
    Challenge,
    Credentials,
    Exchange,
    Identity,
    Mechanism,
    Password,
    Proved,
)
from martlet.errors import Reason, Refused

__all__ = ["ANONYMOUS", "Authentication"]

# Few, because a password hash keeps one core busy, and the event loop needs another.
PASSWORD_THREADS: Final = 2
MECHANISM_SHOWN: Final = 40


@final
class Authentication:
    """The authenticators of all plugins; without any, every client is anonymous."""

    def __init__(self) -> None:
        self.authenticators: tuple[Authenticator, ...] = ()
        self.mechanisms: Mapping[str, Mechanism] = {}  # by name, such as SCRAM-SHA-256
        self.refused = 0
        self._limiter: trio.CapacityLimiter | None = None

    @property
    def required(self) -> bool:
        """Whether a plugin authenticates clients, so that a protocol can ask them for credentials.

        A client without credentials is anonymous nevertheless; authorizers decide about its permissions.
        """
        return bool(self.authenticators or self.mechanisms)

    def authenticate(self, credentials: Credentials) -> Identity:
        """Return the identity that *credentials* prove; for a `Password` use `authenticate_password`.

        If all authenticators abstain, the owner of a certificate, which TLS has verified, is anonymous; other
        credentials are refused, so that no client believes wrongly that it is authenticated.

        Raises:
          Refused: the credentials are wrong, or no authenticator supports them (Reason.CREDENTIALS).
        """
        try:
            return self._ask(credentials)
        except Refused:
            self.refused += 1
            raise

    async def authenticate_password(self, password: Password) -> Identity:
        """Return the identity that *password* proves; checks it in a worker thread.

        Raises:
          Refused: the password is wrong, or no authenticator supports passwords (Reason.CREDENTIALS).
        """
        if not self.authenticators:
            return ANONYMOUS
        try:
            return await trio.to_thread.run_sync(self._ask, password, limiter=self._threads())
        except Refused:
            self.refused += 1
            raise

    def begin(self, mechanism: str) -> Exchange:
        """Return a new exchange by *mechanism*; pass the client's data to `proceed`.

        Raises:
          Refused: no plugin offers the mechanism (Reason.NOT_SUPPORTED).
        """
        begin = self.mechanisms.get(mechanism)
        if begin is None:
            self.refused += 1
            offered = ", ".join(sorted(self.mechanisms)) or "none"
            text = f"authentication mechanism {mechanism[:MECHANISM_SHOWN]!r} is unknown; offered: {offered}"
            raise Refused(Reason.NOT_SUPPORTED, text)
        return begin()

    async def proceed(self, exchange: Exchange, data: bytes) -> Challenge | Proved:
        """Pass *data* of the client to *exchange* in a worker thread; return the next step.

        Raises:
          Refused: the client has proved nothing; end the exchange.
        """
        try:
            return await trio.to_thread.run_sync(exchange, data, limiter=self._threads())
        except Refused:
            self.refused += 1
            raise

    def _threads(self) -> trio.CapacityLimiter:
        if self._limiter is None:
            self._limiter = trio.CapacityLimiter(PASSWORD_THREADS)
        return self._limiter

    def _ask(self, credentials: Credentials) -> Identity:
        for authenticator in self.authenticators:
            identity = authenticator(credentials)
            if identity is not None:
                return identity
        if not self.authenticators or isinstance(credentials, Certificate):
            return ANONYMOUS
        kind = "a password" if isinstance(credentials, Password) else "a signed request"
        raise Refused(Reason.CREDENTIALS, f"no plugin checks {kind}; enable one that does, or send none")
