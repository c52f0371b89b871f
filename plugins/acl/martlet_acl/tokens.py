"""Tokens: JSON Web Tokens (RFC 7519) as passwords, signed with the keys of a JWKS file (RFC 7517).

A client sends its token as password of MQTT or STOMP, or by the mechanism OAUTHBEARER (RFC 7628). Nothing is asked over
the network: the keys are in a file, which is loaded again when it changes. The signature is checked in a worker thread,
as a password is; what the token says about its time is checked at each login.
"""

import binascii
import json
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, final

from msgspec import Struct

from martlet.config import Settings, setting
from martlet.contracts import Exchange, Identity, Password, PasswordCheck, Proved
from martlet.errors import ConfigError, Reason, Refused
from martlet.runtime.clock import Clock
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.subjects import NAME_MAX, check_group_name, check_user_name

if TYPE_CHECKING:
    from jwt import PyJWK

__all__ = ["OAUTHBEARER", "TokenConfig", "Tokens", "is_token"]

OAUTHBEARER: Final = "OAUTHBEARER"
ALGORITHMS: Final = ("RS256", "ES256", "EdDSA")
TOKEN_BYTES_MAX: Final = 16_384
FILE_BYTES_MAX: Final = 1 << 20
GROUPS_MAX: Final = 100
LEEWAY_MS: Final = 30_000  # for clocks that differ
PARTS: Final = 3  # header, claims, signature


class TokenConfig(Settings):
    """The keys for tokens; the plugin derives its configuration from this class."""

    jwks: str = setting("", "JWKS file with the public keys of who issues tokens; empty: no tokens")
    token_issuer: str = setting("", "the claim iss that a token must have; required with jwks")
    token_audience: str = setting("", "a value that the claim aud of a token must have; required with jwks")
    token_user_claim: str = setting("sub", "the claim with the user's name")
    token_groups_claim: str = setting("groups", "the claim with a list of the user's groups; empty: none")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(FILE_BYTES_MAX)


def is_token(password: bytes) -> bool:
    """Return whether *password* has the form of a signed token: three parts, the first one a JSON object."""
    return password.startswith(b"eyJ") and password.count(b".") == 2


class _Claims(Struct, frozen=True):
    """What a token says, before its signature is checked."""

    algorithm: str
    key_id: str
    identity: Identity


@final
class Tokens:
    """Proves identities by tokens, with the keys in ``config.jwks``.

    *refusal_of* returns why the user of a right token may not log in, or None; who made a token up does not learn it.
    *read* returns the content of a file, or raises `OSError`.

    Raises:
      ConfigError: the file cannot be used, a key of the configuration is missing, or PyJWT is.
    """

    def __init__(
        self,
        config: TokenConfig,
        clock: Clock,
        refusal_of: Callable[[str], Refused | None],
        read: Callable[[str], bytes] = _read,
    ) -> None:
        for name in ("token_issuer", "token_audience", "token_user_claim"):
            if not getattr(config, name):
                raise ConfigError(f"acl.{name} is empty; with acl.jwks it must be set")
        self._config = config
        self._clock = clock
        self._refusal_of = refusal_of
        self._read = read
        self._keys: Mapping[str, PyJWK] = {}
        self._digest = b""
        self.load()

    def load(self) -> bool:
        """Load the keys; return whether they have changed. After an error the old ones stay.

        Raises:
          ConfigError: the file is missing or has no usable key.
        """
        path = self._config.jwks
        try:
            data = self._read(path)
        except OSError as error:
            raise ConfigError(f"acl.jwks {path!r} cannot be read; {error.strerror or error}") from error
        digest = sha256(data).digest()
        if digest == self._digest:
            return False
        self._keys = _parse_keys(path, data)
        self._digest = digest
        return True

    def check(self, password: Password) -> PasswordCheck:
        """Return the check of a token that a client sent as *password*.

        Its user name must be empty, ``jwt`` or the name in the token.

        Raises:
          Refused: it is no token for this broker, or it has expired (Reason.CREDENTIALS).
        """
        token = password.password
        claims = self._claims(token)
        if password.user not in ("", "jwt", claims.identity.name):
            raise _refused(f"user {password.user[:NAME_MAX]!r} is not the user of the token")
        refusal = self._refusal_of(claims.identity.name)
        # The digest of all keys: a proof that is kept ends when a key is withdrawn. It does not help a disabled user.
        verifier = b"-" * (refusal is not None) + self._digest
        return PasswordCheck(claims.identity, verifier, partial(self._verify, token, claims, refusal))

    def exchange(self) -> Exchange:
        """Return an exchange of the mechanism OAUTHBEARER."""

        def proceed(data: bytes) -> Proved:
            token = _bearer_token(data)
            claims = self._claims(token)
            self._verify(token, claims, self._refusal_of(claims.identity.name))
            return Proved(claims.identity)

        return proceed

    def _claims(self, token: bytes) -> _Claims:
        """Return what *token* says, after checking everything but its signature."""
        if len(token) > TOKEN_BYTES_MAX:
            raise _refused(f"token of {len(token)} bytes is larger than {TOKEN_BYTES_MAX}")
        parts = token.split(b".")
        if len(parts) != PARTS:
            raise _refused(f"token has {len(parts)} parts instead of {PARTS}")
        header, claims = _json_part(parts[0], "header"), _json_part(parts[1], "claims")
        algorithm, key_id = header.get("alg"), header.get("kid", "")
        if algorithm not in ALGORITHMS or not isinstance(key_id, str) or "crit" in header:
            raise _refused(f"token is signed with {str(algorithm)[:20]!r}; {', '.join(ALGORITHMS)} are accepted")
        config = self._config
        audience = claims.get("aud")
        if config.token_audience not in (audience if isinstance(audience, list) else [audience]):
            raise _refused("token is for another audience")
        if claims.get("iss") != config.token_issuer:
            raise _refused("token is from another issuer")
        expires_ms = self._check_time(claims)
        name = claims.get(config.token_user_claim)
        if not isinstance(name, str) or not _is_name(check_user_name, name):
            text = f"claim {config.token_user_claim!r} of the token is no name of 1 to {NAME_MAX} printable characters"
            raise _refused(text)
        return _Claims(algorithm, key_id, Identity(name, self._groups(claims), expires_ms))

    def _check_time(self, claims: Mapping[str, Any]) -> int:
        """Return when the token expires, in epoch milliseconds."""
        now_ms = self._clock.now_ms()
        expires_ms, begins_ms = _time_ms(claims, "exp"), _time_ms(claims, "nbf")
        if expires_ms is None:
            raise _refused("token has no expiry; it needs the claim exp")
        if now_ms >= expires_ms:
            raise _refused(f"token has expired {(now_ms - expires_ms) / 1000:.0f} s ago")
        if begins_ms is not None and now_ms < begins_ms - LEEWAY_MS:
            raise _refused(f"token is not valid for {(begins_ms - now_ms) / 1000:.0f} s yet")
        return expires_ms

    def _groups(self, claims: Mapping[str, Any]) -> tuple[str, ...]:
        name = self._config.token_groups_claim
        groups = claims.get(name, []) if name else []
        if isinstance(groups, str):
            groups = groups.split()
        if (
            not isinstance(groups, list)
            or len(groups) > GROUPS_MAX
            or not all(isinstance(each, str) and _is_name(check_group_name, each) for each in groups)
        ):
            raise _refused(f"claim {name!r} of the token is no list of up to {GROUPS_MAX} groups")
        return tuple(groups)

    def _verify(self, token: bytes, claims: _Claims, refusal: Refused | None) -> None:
        """Check the signature, then raise *refusal*; in a worker thread. Raises `Refused` (Reason.CREDENTIALS)."""
        import jwt

        keys = self._keys
        candidates = [keys[claims.key_id]] if claims.key_id in keys else [*keys.values()] if not claims.key_id else []
        for key in candidates:
            if key.algorithm_name != claims.algorithm:
                continue
            try:
                jwt.api_jws.decode(token, key, algorithms=[claims.algorithm])
            except jwt.InvalidTokenError:
                continue
            if refusal is not None:
                raise refusal
            return
        raise _refused("signature of the token is wrong, or its key is unknown")


def _is_name(check: Callable[[str], None], name: str) -> bool:
    """Whether *check* accepts *name*."""
    try:
        check(name)
    except PolicyError:
        return False
    return True


def _refused(text: str) -> Refused:
    return Refused(Reason.CREDENTIALS, text)


def _parse_keys(path: str, data: bytes) -> "Mapping[str, PyJWK]":
    """Return the keys for signatures in *data* by their id, or their number if they have none."""
    try:
        import jwt
        from jwt.exceptions import PyJWTError
    except ImportError as error:
        raise ConfigError("acl.jwks needs PyJWT; install it: pip install 'martlet[jwt]'") from error
    try:
        listed = json.loads(data)["keys"]
        found = [each for each in listed if each.get("use", "sig") == "sig" and each.get("kty") != "oct"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"acl.jwks {path!r} is no JWKS file; it must be an object with a list 'keys'") from error
    keys: dict[str, PyJWK] = {}
    for number, each in enumerate(found, 1):
        try:
            key = jwt.PyJWK(each)
            name = _key_id(each, number)
        except (PyJWTError, ValueError, TypeError) as error:
            raise ConfigError(f"acl.jwks {path!r}: key {number} cannot be used; {error}") from error
        if key.algorithm_name not in ALGORITHMS:
            text = f"acl.jwks {path!r}: key {number} is for {key.algorithm_name}; take one of {', '.join(ALGORITHMS)}"
            raise ConfigError(text)
        if name in keys:
            raise ConfigError(f"acl.jwks {path!r}: two keys have the id {name!r}; give each its own")
        keys[name] = key
    if not keys:
        raise ConfigError(f"acl.jwks {path!r} has no public key for signatures")
    return keys


def _key_id(key: Mapping[str, object], number: int) -> str:
    """Return the id of *key*. Raises `ValueError` if it is no text, or if the key is private."""
    if "d" in key:
        raise ValueError("it is private; write its public part only")
    name = key.get("kid") or f"#{number}"
    if not isinstance(name, str):
        raise ValueError("its kid is no text")
    return name


def _json_part(part: bytes, name: str) -> Mapping[str, Any]:
    """Return the JSON object in a part of a token (base64url without padding)."""
    try:
        value = json.loads(urlsafe_b64decode(part + b"=" * (-len(part) % 4)))
    except (ValueError, binascii.Error, RecursionError) as error:
        raise _refused(f"{name} of the token is no JSON") from error
    if not isinstance(value, dict):
        raise _refused(f"{name} of the token is no JSON object")
    return value


def _time_ms(claims: Mapping[str, Any], name: str) -> int | None:
    """Return a NumericDate in epoch milliseconds; None if it is absent."""
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 40:
        raise _refused(f"claim {name!r} of the token is no time in seconds")
    return int(value * 1000)


def _bearer_token(data: bytes) -> bytes:
    """Return the token in a client's message of OAUTHBEARER (RFC 7628 section 3.1)."""
    head, *pairs = data.split(b"\x01")
    if not head.startswith((b"n,", b"y,")) or data[-2:] != b"\x01\x01":
        raise _refused("message is not of the mechanism OAUTHBEARER; it begins with 'n,,' and ends with two bytes 0x01")
    for pair in pairs:
        name, _, value = pair.partition(b"=")
        kind, _, token = value.strip().partition(b" ")
        if name == b"auth" and kind.lower() == b"bearer" and is_token(token.strip()):
            return token.strip()
    raise _refused("message of the mechanism OAUTHBEARER has no signed token; send auth=Bearer and the token")
