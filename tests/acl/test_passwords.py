"""Verifiers of passwords: made, checked, and refused when they cannot be checked."""

import hashlib
from base64 import b64encode

import pytest
from argon2 import low_level

from martlet_acl import passwords
from martlet_acl.passwords import COST, hash_password, parse_verifier, unknown_verifier
from martlet_acl.policy.errors import PolicyError

SALT = b"0123456789abcdef"
# Of argon2-cffi 25.1.0: argon2.low_level.hash_secret(b"secret", SALT, 2, 19456, 1, 32, Type.ID)
ARGON2 = "$argon2id$v=19$m=19456,t=2,p=1$MDEyMzQ1Njc4OWFiY2RlZg$"


def encoded(computed: "hashlib._Hash") -> str:
    return b64encode(computed.digest()).decode().rstrip("=")


def test_the_right_password_is_accepted_and_no_other() -> None:
    text = hash_password(b"s\xc3\xa9same", SALT)
    assert text.startswith("$scrypt$ln=12,r=8,p=1$MDEyMzQ1Njc4OWFiY2RlZg$")
    verifier = parse_verifier(text)
    assert verifier.accepts(b"s\xc3\xa9same")
    for wrong in (b"", b"sesame", b"s\xc3\xa9same ", b"\0"):
        assert not verifier.accepts(wrong)


def test_a_verifier_is_that_of_the_rfc() -> None:
    # RFC 7914 12, the second vector: P="password", S="NaCl", N=1024, r=8, p=16.
    text = (
        "$scrypt$ln=10,r=8,p=16$TmFDbA$"
        "/bq+HJ00cgB4VucZDQHp/nxq18vII3gw53N2Y0s3MWIurzDZLiKjiG/xCSedmDDaxyevuUqD7m2DYMvfoswGQA"
    )
    assert parse_verifier(text).accepts(b"password")


@pytest.mark.parametrize(
    "text",
    [
        # RFC 7914 11 has PBKDF2 with SHA-256: P="passwd", S="salt", c=1.
        "$pbkdf2-sha256$i=1$c2FsdA$"
        "VawEblbjCJ/sFpHCJUS2BflBhSFt3gRl5oudV8INrLxJypzM8Xm2RZkWZLOdd+8xfHG4RbHjC9UJESBB06GXgw",
        # sha256(b"salt" + b"passwd") and sha512(b"passwd" + b"salt")
        f"$salted$h=sha256,at=begin$c2FsdA${encoded(hashlib.sha256(b'saltpasswd'))}",
        f"$salted$h=sha512,at=end$c2FsdA${encoded(hashlib.sha512(b'passwdsalt'))}",
    ],
)
def test_passwords_that_other_brokers_have_hashed_are_checked(text: str) -> None:
    verifier = parse_verifier(text)
    assert verifier.accepts(b"passwd")
    assert not verifier.accepts(b"password")


def test_parameters_are_in_the_verifier_so_that_they_can_grow() -> None:
    for cost in (COST, COST + 1):
        assert parse_verifier(hash_password(b"x", SALT, cost)).accepts(b"x")


def test_a_verifier_for_nobody_accepts_nothing() -> None:
    verifier = unknown_verifier(bytes(range(64)))
    assert not verifier.accepts(b"")
    assert verifier.text.startswith(f"$scrypt$ln={COST},")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("letmein", "no verifier of a password"),
        ("$scrypt$ln=12,r=8,p=1$c2FsdA$", "no verifier of a password"),
        ("$scrypt$ln=12,r=8,p=1$c2FsdA$c2hvcnQ", "has 5 bytes"),
        ("$scrypt$ln=12,r=8,p=1$c2Fsd$AAAAAAAAAAAAAAAAAAAAAA", "is no base64"),
        ("$pbkdf2-sha512$i=0$c2FsdA$AAAAAAAAAAAAAAAAAAAAAA", "i=0 of pbkdf2 is out of range"),
        ("$pbkdf2-sha512$i=1000001$c2FsdA$AAAAAAAAAAAAAAAAAAAAAA", "i=1000001 of pbkdf2 is out of range"),
        ("$pbkdf2-sha512$i=1$c2FsdA$c2hvcnQ", "has 5 bytes"),
        ("$salted$h=sha256,at=end$c2FsdA$c2hvcnQ", "has 5 bytes"),
        ("$salted$h=md5,at=end$c2FsdA$AAAAAAAAAAAAAAAAAAAAAA", "no verifier of a password"),
        ("$scrypt$ln=24,r=8,p=1$c2FsdA$AAAAAAAAAAAAAAAAAAAAAA", "ln=24,r=8,p=1 of scrypt are out of range"),
        ("$scrypt$ln=12,r=8,p=99$c2FsdA$AAAAAAAAAAAAAAAAAAAAAA", "out of range"),
        ("$scrypt$ln=0,r=8,p=1$c2FsdA$AAAAAAAAAAAAAAAAAAAAAA", "out of range"),
        ("$argon2id$v=19$m=9999999,t=2,p=1$c2FsdA$AAAA", "m=9999999,t=2,p=1 of argon2 are out of range"),
        ("$argon2id$v=19$m=19456,t=99,p=1$c2FsdA$AAAA", "out of range"),
        ("x" * 600, "has 600 characters"),
    ],
)
def test_what_is_no_verifier_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason) as caught:
        parse_verifier(text)
    assert "AAAA" not in str(caught.value)


def test_argon2_is_checked_if_a_stored_verifier_asks_for_it() -> None:
    text = low_level.hash_secret(b"secret", SALT, 2, 19456, 1, 32, low_level.Type.ID).decode()
    assert text.startswith(ARGON2)
    verifier = parse_verifier(text)
    assert verifier.accepts(b"secret")
    assert not verifier.accepts(b"Secret")


def test_argon2_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "find_spec", lambda name: None)
    with pytest.raises(PolicyError, match=r"pip install 'martlet\[argon2\]'"):
        parse_verifier(ARGON2 + "A" * 43)


def test_a_verifier_does_not_show_its_hash() -> None:
    assert repr(parse_verifier(hash_password(b"x", SALT))) == "Verifier()"
