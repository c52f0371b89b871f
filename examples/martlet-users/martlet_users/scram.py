"""SCRAM-SHA-256 (RFC 5802 and 7677): a user proves to know the password, and the broker to know its hash.

The password itself is never sent, and cannot be found from what is stored, other than by guessing. The broker needs no
slow hash: the client computes it. Channel binding is not offered.
"""

import hashlib
import hmac
import secrets
import stringprep
import unicodedata
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from martlet.contracts import Challenge, Exchange, Identity, Proved
from martlet.errors import Reason, Refused

__all__ = ["NAME", "ScramSecret", "begin_scram", "make_secret", "prepare", "read_secret"]

NAME: Final = "SCRAM-SHA-256"
# RFC 7677 4 wants 4096 at least. This takes some 30 ms of the client's time at each connection.
ITERATIONS: Final = 65_536
ITERATIONS_MIN: Final = 4096
SALT_BYTES: Final = 16
KEY_BYTES: Final = 32
MESSAGE_BYTES_MAX: Final = 4096
# What a prepared text must not contain (RFC 4013 2.3).
_PROHIBITED: Final = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


@final
@dataclass(frozen=True, slots=True)
class ScramSecret:
    """What the broker knows of a password (RFC 5802 3)."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def __str__(self) -> str:
        salt, stored, server = (b64encode(each).decode() for each in (self.salt, self.stored_key, self.server_key))
        return f"{NAME}${self.iterations}:{salt}${stored}:{server}"


def prepare(text: str) -> str:
    """Return *text* as SASLprep makes it, so that it is the same however it was typed (RFC 4013).

    Raises:
      ValueError: it contains what cannot be typed, such as control characters.
    """
    mapped = "".join(
        " " if stringprep.in_table_c12(each) else each for each in text if not stringprep.in_table_b1(each)
    )
    found = unicodedata.normalize("NFKC", mapped)
    for each in found:
        if any(is_prohibited(each) for is_prohibited in _PROHIBITED):
            raise ValueError(f"contains {each!r}")
    if any(map(stringprep.in_table_d1, found)):
        is_mixed = any(map(stringprep.in_table_d2, found))
        if is_mixed or not (stringprep.in_table_d1(found[0]) and stringprep.in_table_d1(found[-1])):
            raise ValueError("mixes directions of writing")
    return found


def make_secret(password: str, salt: bytes, iterations: int = ITERATIONS) -> ScramSecret:
    """Return what to store of *password*. Raises `ValueError` as `prepare` does."""
    salted = hashlib.pbkdf2_hmac("sha256", prepare(password).encode(), salt, iterations)
    client_key, server_key = hmac.digest(salted, b"Client Key", "sha256"), hmac.digest(salted, b"Server Key", "sha256")
    return ScramSecret(salt, iterations, hashlib.sha256(client_key).digest(), server_key)


def read_secret(text: str) -> ScramSecret:
    """Return the secret of which *text* is the string. Raises `ValueError` if it is none."""
    name, first, second = text.split("$")
    iterations, _, salt = first.partition(":")
    stored_key, server_key = (b64decode(each, validate=True) for each in second.split(":"))
    secret = ScramSecret(b64decode(salt, validate=True), int(iterations), stored_key, server_key)
    if name != NAME or secret.iterations < ITERATIONS_MIN or not secret.salt:
        raise ValueError("no secret of SCRAM-SHA-256")
    if len(stored_key) != KEY_BYTES or len(server_key) != KEY_BYTES:
        raise ValueError("keys of another length")
    return secret


def begin_scram(find: Callable[[str], ScramSecret | None], pepper: bytes) -> Exchange:
    """Return an exchange with one client.

    Args:
      find: returns the secret of a user, None if there is no such user.
      pepper: of it and the name the salt of a user who does not exist is made, so that nobody learns who exists.
    """
    return _Scram(find, pepper).proceed


@final
class _Scram:
    """One exchange (RFC 5802 5): the client's first message, ours, its proof, and ours."""

    __slots__ = ("_binding", "_find", "_first", "_is_known", "_name", "_nonce", "_pepper", "_secret")

    def __init__(self, find: Callable[[str], ScramSecret | None], pepper: bytes) -> None:
        self._find = find
        self._pepper = pepper
        self._name = ""
        self._secret: ScramSecret | None = None  # None until the client's first message came
        self._is_known = False
        self._binding = b""
        self._nonce = ""
        self._first = ""  # the client's first message without its header, and ours

    def proceed(self, data: bytes) -> Challenge | Proved:
        if len(data) > MESSAGE_BYTES_MAX:
            raise _wrong("is too long")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise _wrong("is not UTF-8") from error
        if self._secret is not None:
            return self._finish(text, self._secret)
        return self._begin(text) if text else Challenge(b"")  # it begins with our first message, which is empty

    def _begin(self, text: str) -> Challenge:
        binding, authorized, bare = (*text.split(",", 2), "", "")[:3]
        if not bare or binding not in ("n", "y"):
            raise _wrong("asks for channel binding, or has no header; begin with 'n,,'")
        fields = bare.split(",")
        if len(fields) < 2 or fields[0][:2] != "n=" or fields[1][:2] != "r=" or len(fields[1]) < 3:
            raise _wrong("has no name and nonce; send 'n,,n=NAME,r=NONCE'")
        self._name = name = _name(fields[0][2:])
        if authorized and (authorized[:2] != "a=" or _name(authorized[2:]) != name):
            raise Refused(Reason.CREDENTIALS, f"user {name!r} cannot act for somebody else")
        found = self._find(name)
        self._is_known = found is not None
        salt = hmac.digest(self._pepper, name.encode(), "sha256")[:SALT_BYTES]
        self._secret = secret = found or ScramSecret(salt, ITERATIONS, bytes(KEY_BYTES), bytes(KEY_BYTES))
        self._nonce = fields[1][2:] + secrets.token_urlsafe(24)
        self._binding = f"{binding},{authorized},".encode()
        answer = f"r={self._nonce},s={b64encode(secret.salt).decode()},i={secret.iterations}"
        self._first = f"{bare},{answer}"
        return Challenge(answer.encode())

    def _finish(self, text: str, secret: ScramSecret) -> Proved:
        without_proof, _, proof = text.rpartition(",p=")
        fields = without_proof.split(",")
        if len(fields) < 2 or fields[0][:2] != "c=" or fields[1][:2] != "r=":
            raise _wrong("has no binding, nonce and proof; send 'c=BINDING,r=NONCE,p=PROOF'")
        message = f"{self._first},{without_proof}".encode()
        signature = hmac.digest(secret.stored_key, message, "sha256")
        proved = _decoded(proof)
        if len(proved) != KEY_BYTES:
            raise _wrong(f"has a proof of {len(proved)} bytes; it has {KEY_BYTES}")
        key = bytes(one ^ other for one, other in zip(proved, signature, strict=True))
        fits = hmac.compare_digest(hashlib.sha256(key).digest(), secret.stored_key)
        is_same = hmac.compare_digest(fields[1][2:].encode(), self._nonce.encode())
        if not (fits and is_same and self._is_known and _decoded(fields[0][2:]) == self._binding):
            raise Refused(Reason.CREDENTIALS, f"user {self._name!r} or the password is wrong")
        answer = b64encode(hmac.digest(secret.server_key, message, "sha256"))
        return Proved(Identity(self._name), b"v=" + answer)


def _name(text: str) -> str:
    """Return the user name that a message has as *text* (RFC 5802 5.1)."""
    if "=" in text.replace("=2C", "").replace("=3D", ""):
        raise _wrong("has '=' in a name; write =3D")
    try:
        return prepare(text.replace("=2C", ",").replace("=3D", "="))
    except ValueError as error:
        raise _wrong(f"has a name that {error}") from error


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise _wrong("has something that is not base64") from error


def _wrong(what: str) -> Refused:
    return Refused(Reason.CREDENTIALS, f"message of {NAME} {what}")
