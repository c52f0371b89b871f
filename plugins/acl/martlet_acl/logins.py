"""Logins: passwords, access keys and certificates of users (`martlet.contracts.Authenticator`).

While the plugin observes, a login that would be refused is noted, and the client gets the identity that it claims: no
rule is enforced either.
"""

import hmac
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from hashlib import sha1
from typing import final

from martlet.contracts import (
    AccessKey,
    Certificate,
    Credentials,
    Identity,
    LoginOrigin,
    Nobody,
    Password,
    PasswordCheck,
    SignedRequest,
    SigningSecret,
)
from martlet.errors import Reason, Refused
from martlet_acl.passwords import Verifier, parse_verifier, unknown_verifier
from martlet_acl.state import AclState
from martlet_acl.tokens import Tokens, is_token

__all__ = ["Logins"]


@final
class Logins:
    """Authenticates users of the *state* of this moment.

    Args:
      random: returns 32 random bytes.
      cost: of the check for users who do not exist.
      tokens: verifies tokens that come as passwords; None if they are not in use.
      observe: called with the name, the method and the reason of a login that would be refused; from any thread.
    """

    def __init__(
        self,
        state: Callable[[], AclState],
        random: Callable[[], bytes],
        cost: int,
        observe: Callable[[str, str, str], None],
        tokens: Tokens | None = None,
    ) -> None:
        self._state = state
        self._random = random
        self._observe = observe
        self._tokens = tokens
        self._unknown = unknown_verifier(random() + random(), cost)
        self._unknown_secret = random()

    def authenticate(
        self, credentials: Credentials, origin: LoginOrigin
    ) -> Identity | PasswordCheck | SigningSecret | None:
        """An `Authenticator`. Rules decide what a client without credentials may do."""
        match credentials:
            case Password(_, password) if self._tokens is not None and is_token(password):
                return self._check_token(self._tokens, credentials)
            case Password(name, password):
                return self._check_password(name, password)
            case AccessKey(access_key):
                # While it observes, the core must not refuse wrong signatures, so the plugin verifies them.
                return None if self._state().observe else self._find_secret(access_key)
            case SignedRequest():
                return self._check_signature(credentials)
            case Certificate(name):
                return self._check_certificate(name)
            case Nobody():
                return None

    def _check_token(self, tokens: Tokens, credentials: Password) -> Identity | PasswordCheck:
        if not self._state().observe:
            return tokens.check(credentials)
        try:
            check = tokens.check(credentials)
        except Refused as refused:
            self._observe(credentials.user, "token", str(refused))
            return Identity(credentials.user)
        name = check.identity.name
        return PasswordCheck(check.identity, self._random(), partial(self._verify_observed, name, "token", check.check))

    def _check_password(self, name: str, password: bytes) -> PasswordCheck:
        state = self._state()
        user = state.users.get(name)
        stored = state.secrets_of(name).password if user is not None else ""
        verifier = parse_verifier(stored) if stored else self._unknown
        is_disabled = user is not None and user.disabled
        check = partial(self._verify, name, password, verifier, is_disabled=is_disabled)
        if state.observe:
            # A key of its own, so that the password does not count as proved once the rules are enforced.
            return PasswordCheck(
                Identity(name), self._random(), partial(self._verify_observed, name, "password", check)
            )
        # A disabled user has another key: the password may have been proved before.
        return PasswordCheck(Identity(name), b"-" * is_disabled + verifier.text.encode(), check)

    def _verify(self, name: str, password: bytes, verifier: Verifier, *, is_disabled: bool) -> None:
        """Raise `Refused` unless *password* is right; called in a worker thread."""
        if not verifier.accepts(password):
            raise Refused(Reason.CREDENTIALS, f"user {name!r} or the password is wrong")
        if is_disabled:
            raise Refused(Reason.CREDENTIALS, f"user {name!r} is disabled")

    def _verify_observed(self, name: str, method: str, check: Callable[[], object]) -> None:
        try:
            check()
        except Refused as refused:
            self._observe(name, method, str(refused))

    def _find_secret(self, access_key: str) -> SigningSecret:
        state = self._state()
        name = state.keys.get(access_key)
        if name is not None and state.is_enabled(name):
            key = state.secrets_of(name).keys[access_key]
            if not key.disabled:
                return SigningSecret(Identity(name), key.secret.encode())
        # Nobody has signed with a random secret, and the refusal takes as long as for a key that exists.
        return SigningSecret(Identity(access_key), self._unknown_secret)

    def _check_signature(self, request: SignedRequest) -> Identity:
        """Verify one request, while the plugin observes."""
        access_key = request.access_key
        answer = self._find_secret(access_key)
        digest = hmac.new(answer.secret, request.content, sha1).digest()
        if not hmac.compare_digest(b64encode(digest), request.signature.encode("utf-8", "replace")):
            self._observe(access_key, "signature", f"access key {access_key!r} or the signature is wrong")
        return answer.identity

    def _check_certificate(self, name: str) -> Identity | None:
        """Return the user *name*; None if there is none: who has a certificate need not be a user."""
        state = self._state()
        user = state.users.get(name) if name else None
        if user is None:
            return None
        if user.disabled:
            if not state.observe:
                raise Refused(Reason.CREDENTIALS, f"user {name!r} is disabled")
            self._observe(name, "certificate", f"user {name!r} is disabled")
        return Identity(name)
