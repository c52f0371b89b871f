"""Authentication: turns credentials into an identity.

The authenticators of the plugins are called in order. The first one that does not abstain decides: it returns an
identity, refuses, or returns the check of a password, which waits for a worker thread (`login_line.py`) unless the same
password was proved before (`proofs.py`).

Whoever signs each request proves the same identity again and again. So authenticators may answer an access key with its
secret, which connections keep until `Authentication.changed` is called (`signers.py`).

A mechanism authenticates in several steps, as SASL's do (RFC 4422). A protocol with such exchanges begins one by the
mechanism's name, and passes data between client and exchange.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, final

from msgspec.structs import replace

from martlet.access.ended_logins import EndedLogins
from martlet.access.login_line import LoginLine
from martlet.access.proofs import ProofCache
from martlet.access.signers import Signer
from martlet.contracts import (
    ANONYMOUS,
    AccessKey,
    Authenticator,
    Certificate,
    Challenge,
    Credentials,
    Exchange,
    Identity,
    LoginEvent,
    LoginOrigin,
    Mechanism,
    Nobody,
    Password,
    PasswordCheck,
    Peer,
    Proved,
    SignedRequest,
    SigningSecret,
)
from martlet.errors import Reason, Refused

__all__ = ["ANONYMOUS", "Authentication"]

MECHANISM_SHOWN: Final = 40
# The methods of a `LoginEvent`.
PASSWORD: Final = "password"
SIGNATURE: Final = "signature"
CERTIFICATE: Final = "certificate"
MECHANISM: Final = "mechanism"
NONE: Final = "none"


@final
class _BegunExchange:
    """An exchange of a mechanism, which began when *begun* logins had been ended."""

    __slots__ = ("_exchange", "begun")

    def __init__(self, exchange: Exchange, begun: int) -> None:
        self._exchange = exchange
        self.begun = begun

    def __call__(self, data: bytes) -> Challenge | Proved:
        return self._exchange(data)


@final
class Authentication:
    """The authenticators of all plugins; without any, every client is anonymous.

    *key* is random, and *now_ms* the wall clock, by which logins expire.
    """

    def __init__(self, key: bytes, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.authenticators: tuple[Authenticator, ...] = ()
        self.mechanisms: Mapping[str, Mechanism] = {}  # by name, such as SCRAM-SHA-256
        self.listeners: list[Callable[[LoginEvent], None]] = []
        self.refused = 0
        self.generation = 0  # of the credentials: each change makes another one
        self.proofs = ProofCache(key)
        self.line = LoginLine()
        self._now_ms = now_ms
        self._ended = EndedLogins()

    @property
    def required(self) -> bool:
        """Whether a plugin authenticates clients, so that a protocol can ask them for credentials.

        A client without credentials is anonymous nevertheless; authorizers decide about its permissions.
        """
        return bool(self.authenticators or self.mechanisms)

    def authenticate(self, credentials: SignedRequest | Certificate | Nobody, origin: LoginOrigin) -> Identity:
        """Return the identity that *credentials* prove.

        If all authenticators abstain, a client without credentials is anonymous, and so is the owner of a certificate,
        which TLS has verified. A signed request is refused, so that a client does not wrongly believe it was
        authenticated.

        Raises:
          Refused: the credentials are wrong, or no authenticator supports them (Reason.CREDENTIALS).
        """
        user, method = _named(credentials)
        try:
            if isinstance(credentials, SignedRequest):
                return self._verify_request(credentials, origin)  # each is signed; `note_signer` tells of the first
            identity = self._identity(credentials, origin)
        except Refused as refused:
            self._note_refusal(origin, user, method, refused)
            raise
        self._tell(LoginEvent(origin, user, method, identity))
        return identity

    def _verify_request(self, request: SignedRequest, origin: LoginOrigin) -> Identity:
        signer = self._find_signer(AccessKey(request.access_key, request.token), origin)
        if signer is None:
            try:
                return self._identity(request, origin)
            except Refused:
                if not request.token:
                    raise
            return self._identity(replace(request, content=request.without_token), origin)
        for content in (request.content, request.without_token) if request.token else (request.content,):
            if signer.has_signed(content, request.signature):
                self.check_expiry(signer.identity)
                return signer.identity
        raise _wrong_signature(request.access_key)

    def _identity(self, credentials: Credentials, origin: LoginOrigin) -> Identity:
        answer = self._ask(credentials, origin)
        if not isinstance(answer, Identity):
            raise TypeError(f"an authenticator answered {answer!r:.80} instead of an identity")
        self.check_expiry(answer)
        return answer

    def has_expired(self, identity: Identity) -> bool:
        """Return whether the proof of *identity* has expired."""
        return bool(identity.expires_ms) and identity.expires_ms <= self._now_ms()

    def check_expiry(self, identity: Identity) -> None:
        """Raise `Refused` if the proof of *identity* has expired (Reason.CREDENTIALS)."""
        if self.has_expired(identity):
            raise Refused(Reason.CREDENTIALS, f"the login of {identity.name!r} has expired; log in again")

    def cut_wait_ms(self, identity: Identity, wait_ms: int) -> int:
        """Return *wait_ms*, how long a request of *identity* wants to wait; less if its proof expires earlier."""
        expires_ms = identity.expires_ms
        return min(wait_ms, max(expires_ms - self._now_ms(), 0)) if expires_ms else wait_ms

    def end_logins(self, matches: Callable[[Identity], bool], refused: Refused) -> None:
        """Refuse the logins in progress of identities that *matches* accepts, and forget secrets as `changed` does."""
        self._ended.add(matches, refused)
        self.changed()

    def find_signer(self, key: AccessKey, origin: LoginOrigin) -> Signer | None:
        """Return the verifier of signatures by *key*; use it for as long as `generation` is the same.

        None means that authenticators verify each `SignedRequest` themselves, or do not know the key.

        Raises:
          Refused: an authenticator refuses the key (Reason.CREDENTIALS).
        """
        try:
            return self._find_signer(key, origin)
        except Refused as refused:
            self._note_refusal(origin, key.access_key, SIGNATURE, refused)
            raise

    def _find_signer(self, key: AccessKey, origin: LoginOrigin) -> Signer | None:
        for authenticator in self.authenticators:
            answer = authenticator(key, origin)
            if isinstance(answer, SigningSecret):
                return Signer(answer)
            if answer is not None:
                raise TypeError(f"an authenticator answered {answer!r:.80} instead of a secret to an access key")
        return None

    def count_wrong_signature(self, access_key: str, origin: LoginOrigin) -> Refused:
        """Count a refusal and return its error. It does not say whether the key exists."""
        refused = _wrong_signature(access_key)
        self._note_refusal(origin, access_key, SIGNATURE, refused)
        return refused

    def note_signer(self, identity: Identity, origin: LoginOrigin) -> None:
        """Tell the listeners that *identity* signed the first of its requests on a connection."""
        self._tell(LoginEvent(origin, identity.name, SIGNATURE, identity))

    def changed(self) -> None:
        """Forget the secrets that authenticators have answered. Call this after users, keys or their secrets changed.

        A reload does it after `martlet_reload`. Proved passwords need no such call: a changed hash is another one.
        """
        self.generation += 1

    def identify(self, peer: Peer, client_id: str = "") -> Identity:
        """Return the identity of a client without credentials: that of its certificate, or an anonymous one.

        Raises:
          Refused: an authenticator lets no anonymous client in (Reason.CREDENTIALS).
        """
        if not self.authenticators or peer.identity.name:
            return peer.identity
        return self.authenticate(Nobody(), peer.login_origin(client_id))

    async def authenticate_password(self, password: Password, origin: LoginOrigin) -> Identity:
        """Return the identity that *password* proves; a slow check waits for a worker thread.

        Raises:
          Refused: the password is wrong, or no authenticator supports passwords (Reason.CREDENTIALS), or too many
            logins wait or failed (Reason.BUSY).
        """
        if not self.authenticators:
            return ANONYMOUS
        begun = self._ended.count
        try:
            answer = self._ask(password, origin)
            identity = await self._verify(password, origin, answer) if isinstance(answer, PasswordCheck) else answer
            self._check_proved(identity, begun)
        except Refused as refused:
            self._note_refusal(origin, password.user, PASSWORD, refused)
            raise
        self._tell(LoginEvent(origin, password.user, PASSWORD, identity))
        return identity

    async def _verify(self, password: Password, origin: LoginOrigin, answer: PasswordCheck) -> Identity:
        """Return the identity of *answer*, without its slow check if the password was proved within the hour."""
        proofs, user = self.proofs, password.user
        key = proofs.key_of(user, password.password, answer.verifier)
        if not proofs.has(user, key):
            await self.line.run(origin, user, answer.check)
            proofs.add(user, key)
        return answer.identity

    def begin(self, mechanism: str) -> Exchange:
        """Return a new exchange by *mechanism*; pass the client's data to `proceed`.

        Raises:
          Refused: no plugin offers the mechanism (Reason.NOT_SUPPORTED).
        """
        make_exchange = self.mechanisms.get(mechanism)
        if make_exchange is None:
            self.refused += 1
            offered = ", ".join(sorted(self.mechanisms)) or "none"
            text = f"authentication mechanism {mechanism[:MECHANISM_SHOWN]!r} is unknown; offered: {offered}"
            raise Refused(Reason.NOT_SUPPORTED, text)
        return _BegunExchange(make_exchange(), self._ended.count)

    async def proceed(self, exchange: Exchange, data: bytes, origin: LoginOrigin) -> Challenge | Proved:
        """Pass *data* of the client to *exchange* in a worker thread; return the next step.

        Raises:
          Refused: the client has proved nothing; end the exchange.
        """
        begun = exchange.begun if isinstance(exchange, _BegunExchange) else self._ended.count
        try:
            step = await self.line.run(origin, "", partial(exchange, data))
            if isinstance(step, Proved):
                self._check_proved(step.identity, begun)
        except Refused as refused:
            self._note_refusal(origin, "", MECHANISM, refused)
            raise
        if isinstance(step, Proved):
            self._tell(LoginEvent(origin, step.identity.name, MECHANISM, step.identity))
        return step

    def _check_proved(self, identity: Identity, begun: int) -> None:
        """Raise `Refused` if *identity* has expired, or its logins were ended since this one had *begun*."""
        self.check_expiry(identity)
        self._ended.check(identity, begun)

    def _note_refusal(self, origin: LoginOrigin, user: str, method: str, refused: Refused) -> None:
        self.refused += 1
        self._tell(LoginEvent(origin, user, method, None, str(refused)))

    def _tell(self, event: LoginEvent) -> None:
        for tell in self.listeners:
            tell(event)

    def _ask(self, credentials: Credentials, origin: LoginOrigin) -> Identity | PasswordCheck:
        for authenticator in self.authenticators:
            answer = authenticator(credentials, origin)
            if isinstance(answer, SigningSecret):
                raise TypeError("an authenticator answered a SigningSecret to something other than an access key")
            if answer is not None:
                return answer
        if not self.authenticators or isinstance(credentials, Certificate | Nobody):
            return ANONYMOUS
        kind = "a password" if isinstance(credentials, Password) else "a signed request"
        raise Refused(Reason.CREDENTIALS, f"no plugin checks {kind}; enable one that does, or send none")

    def statistics(self) -> dict[str, object]:
        """Return the logins that wait for a check, and the passwords that need none."""
        return {**self.line.statistics(), "proved": len(self.proofs)}


def _wrong_signature(access_key: str) -> Refused:
    return Refused(Reason.CREDENTIALS, f"access key {access_key!r} or the signature is wrong")


def _named(credentials: SignedRequest | Certificate | Nobody) -> tuple[str, str]:
    """Return the name that *credentials* give, and the method."""
    if isinstance(credentials, SignedRequest):
        return credentials.access_key, SIGNATURE
    if isinstance(credentials, Certificate):
        return credentials.common_name, CERTIFICATE
    return "", NONE
