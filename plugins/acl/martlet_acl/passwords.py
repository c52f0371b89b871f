"""Verifiers of passwords: what is stored instead of a password, in the format of PHC strings.

    $scrypt$ln=12,r=8,p=1$SALT$HASH                the default: needs no further package
    $argon2id$v=19$m=19456,t=2,p=1$SALT$HASH       only checked, with the extra martlet[argon2]
    $pbkdf2-sha512$i=101$SALT$HASH                 only checked: of Mosquitto
    $salted$h=sha256,at=begin$SALT$HASH            only checked: one SHA-2 over salt and password, of RabbitMQ
    $salted$h=sha512,at=end$SALT$HASH              and of old versions of Mosquitto

The parameters are in the verifier, so new passwords can get stronger ones while the old ones stay valid.
"""

import hashlib
import hmac
import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final, final

from msgspec import Struct

from martlet_acl.policy.errors import PolicyError

__all__ = ["COST", "COST_MAX", "COST_MIN", "Verifier", "hash_password", "parse_verifier", "unknown_verifier"]

# The exponent of scrypt's N. 4096 takes 6 ms of a core and 4 MiB: 10,000 clients that come back after a restart are
# checked in 30 s by two threads. Each further step doubles both.
COST: Final = 12
COST_MIN: Final = 12
COST_MAX: Final = 17
BLOCKS: Final = 8  # RFC 7914 2 recommends r = 8 and p = 1
SALT_BYTES: Final = 16
HASH_BYTES: Final = 32
# Verifiers from elsewhere may have other parameters, but not such that one check uses up the machine.
MEMORY_MAX: Final = 256 << 20
PASSES_MAX: Final = 16
TEXT_MAX: Final = 512
# 0.5 s of a core.
ITERATIONS_MAX: Final = 1_000_000

_SCRYPT: Final = re.compile(
    r"\$scrypt\$ln=(?P<n>\d{1,2}),r=(?P<r>\d{1,2}),p=(?P<p>\d{1,2})\$(?P<salt>[\w+/]+)\$(?P<hash>[\w+/]+)", re.ASCII
)
_ARGON2: Final = re.compile(
    r"\$argon2(?:id|i|d)\$v=19\$m=(?P<m>\d{1,7}),t=(?P<t>\d{1,2}),p=(?P<p>\d{1,2})\$[\w+/]+\$[\w+/]+", re.ASCII
)
_PBKDF2: Final = re.compile(
    r"\$pbkdf2-(?P<h>sha256|sha512)\$i=(?P<i>\d{1,7})\$(?P<salt>[\w+/]+)\$(?P<hash>[\w+/]+)", re.ASCII
)
_SALTED: Final = re.compile(
    r"\$salted\$h=(?P<h>sha256|sha512),at=(?P<at>begin|end)\$(?P<salt>[\w+/]+)\$(?P<hash>[\w+/]+)", re.ASCII
)


@final
class Verifier(Struct, frozen=True):
    """A stored verifier; *accepts* takes milliseconds, and the same time for every password."""

    text: str
    accepts: Callable[[bytes], bool]

    def __repr__(self) -> str:
        return "Verifier()"


def hash_password(password: bytes, salt: bytes, cost: int = COST) -> str:
    """Return the text of a verifier for *password*; *salt* is `SALT_BYTES` random bytes, or more."""
    parameters = f"ln={cost},r={BLOCKS},p=1"
    digest = _scrypt(password, salt, 1 << cost, BLOCKS, 1, HASH_BYTES)
    return "$".join(("", "scrypt", parameters, _encode(salt), _encode(digest)))


def unknown_verifier(random: bytes, cost: int = COST) -> Verifier:
    """Return a verifier that accepts no password, and takes as long as a real one; *random* is 48 bytes or more."""
    salt, digest = random[:SALT_BYTES], random[-HASH_BYTES:]
    return parse_verifier("$".join(("", "scrypt", f"ln={cost},r={BLOCKS},p=1", _encode(salt), _encode(digest))))


def parse_verifier(text: str) -> Verifier:
    """Return the verifier *text*.

    Raises:
      PolicyError: it is none, or is too expensive, or needs a package that is not installed.
    """
    if len(text) > TEXT_MAX:
        raise PolicyError(f"a verifier has {len(text)} characters; {TEXT_MAX} are allowed")
    if found := _SCRYPT.fullmatch(text):
        return _parse_scrypt(text, found)
    if found := _ARGON2.fullmatch(text):
        return _parse_argon2(text, found)
    if found := _PBKDF2.fullmatch(text):
        return _parse_pbkdf2(text, found)
    if found := _SALTED.fullmatch(text):
        return _parse_salted(text, found)
    raise PolicyError("it is no verifier of a password; set the password with `martlet acl user set NAME --password`")


def _parse_scrypt(text: str, found: re.Match[str]) -> Verifier:
    n, r, p = 1 << int(found["n"]), int(found["r"]), int(found["p"])
    if not (n > 1 and r and p) or 128 * n * r > MEMORY_MAX or p > PASSES_MAX:
        raise PolicyError(f"the parameters {found[0].split('$')[2]} of scrypt are out of range")
    salt, digest = _salt_and_hash(found, "scrypt")

    def accepts(password: bytes) -> bool:
        return hmac.compare_digest(_scrypt(password, salt, n, r, p, len(digest)), digest)

    return Verifier(text, accepts)


def _salt_and_hash(found: re.Match[str], function: str) -> tuple[bytes, bytes]:
    try:
        salt, digest = _decode(found["salt"]), _decode(found["hash"])
    except ValueError as error:
        raise PolicyError(f"the salt or the hash of {function} is no base64") from error
    if len(digest) < SALT_BYTES:
        raise PolicyError(f"the hash of {function} has {len(digest)} bytes; write {SALT_BYTES} or more")
    return salt, digest


def _parse_argon2(text: str, found: re.Match[str]) -> Verifier:
    if not 0 < int(found["m"]) << 10 <= MEMORY_MAX or not 0 < int(found["t"]) <= PASSES_MAX:
        raise PolicyError(f"the parameters {text.split('$')[3]} of argon2 are out of range")
    if find_spec("argon2") is None:
        raise PolicyError("it needs argon2, which is not installed; pip install 'martlet[argon2]'")

    def accepts(password: bytes) -> bool:
        # Only a broker whose users have such verifiers loads it.
        from argon2 import PasswordHasher
        from argon2.exceptions import VerificationError

        try:
            return PasswordHasher().verify(text, password)
        except VerificationError:
            return False

    return Verifier(text, accepts)


def _parse_pbkdf2(text: str, found: re.Match[str]) -> Verifier:
    function, iterations = found["h"], int(found["i"])
    if not 0 < iterations <= ITERATIONS_MAX:
        raise PolicyError(f"the parameter i={iterations} of pbkdf2 is out of range")
    salt, digest = _salt_and_hash(found, "pbkdf2")

    def accepts(password: bytes) -> bool:
        computed = hashlib.pbkdf2_hmac(function, password, salt, iterations, len(digest))
        return hmac.compare_digest(computed, digest)

    return Verifier(text, accepts)


def _parse_salted(text: str, found: re.Match[str]) -> Verifier:
    function, salt_begins = found["h"], found["at"] == "begin"
    salt, digest = _salt_and_hash(found, function)

    def accepts(password: bytes) -> bool:
        salted = salt + password if salt_begins else password + salt
        return hmac.compare_digest(hashlib.new(function, salted).digest(), digest)

    return Verifier(text, accepts)


def _scrypt(password: bytes, salt: bytes, n: int, r: int, p: int, size: int) -> bytes:
    memory = 128 * r * (n + p + 2)
    return hashlib.scrypt(password, salt=salt, n=n, r=r, p=p, maxmem=memory + (1 << 20), dklen=size)


def _encode(data: bytes) -> str:
    return b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return b64decode(text + "=" * (-len(text) % 4), validate=True)
