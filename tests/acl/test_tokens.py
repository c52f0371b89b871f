"""Tokens as passwords: what is accepted, and every reason to refuse one."""

import json
from base64 import urlsafe_b64encode
from collections.abc import Callable
from functools import partial
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as generate_rsa_key
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from martlet.contracts import Identity, Password, Proved
from martlet.errors import ConfigError, Reason, Refused
from martlet_acl.tokens import TokenConfig, Tokens, is_token

NOW_S = 1_800_000_000
CLAIMS = {
    "iss": "https://id.example.org",
    "aud": "martlet",
    "sub": "ann",
    "exp": NOW_S + 60,
    "groups": ["staff", "ops"],
}
CONFIG = TokenConfig(jwks="jwks.json", token_issuer="https://id.example.org", token_audience="martlet")
RSA, EC, ED = generate_rsa_key(65537, 2048), generate_private_key(SECP256R1()), Ed25519PrivateKey.generate()
PRIVATE: dict[str, tuple[str, Any]] = {"r": ("RS256", RSA), "e": ("ES256", EC), "d": ("EdDSA", ED)}


def jwk(name: str, **more: str) -> dict[str, Any]:
    algorithm: Any = {"r": RSAAlgorithm, "e": ECAlgorithm, "d": OKPAlgorithm}[name]
    return {**json.loads(algorithm.to_jwk(PRIVATE[name][1].public_key())), "kid": name, **more}


class Now:
    def __init__(self) -> None:
        self.ms = NOW_S * 1000

    def now_ms(self) -> int:
        return self.ms


class File:
    def __init__(self, *keys: dict[str, Any]) -> None:
        self.data = json.dumps({"keys": keys}).encode()

    def __call__(self, path: str) -> bytes:
        return self.data


def refusal_of(name: str) -> Refused | None:
    return Refused(Reason.CREDENTIALS, "user 'eve' is disabled") if name == "eve" else None


def made(*keys: dict[str, Any], clock: Now | None = None) -> Tokens:
    return Tokens(CONFIG, clock or Now(), refusal_of, File(*(keys or map(jwk, PRIVATE))))


def token(key: str = "r", headers: dict[str, Any] | None = None, **changes: Any) -> bytes:
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    algorithm, private = PRIVATE[key]
    return jwt.encode(claims, private, algorithm, headers={"kid": key} if headers is None else headers).encode()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.reason is Reason.CREDENTIALS
    return str(caught.value)


@pytest.mark.parametrize("user", ["", "jwt", "ann"])
@pytest.mark.parametrize("key", PRIVATE)
def test_a_token_proves_its_user_and_groups_until_it_expires(key: str, user: str) -> None:
    password = token(key)
    assert is_token(password)
    check = made().check(Password(user, password))
    check.check()
    assert check.identity == Identity("ann", ("staff", "ops"), (NOW_S + 60) * 1000)


def test_a_token_without_a_key_id_may_be_signed_with_any_key() -> None:
    made().check(Password("", token("e", {}))).check()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"exp": NOW_S}, "token has expired 0 s ago"),
    ({"exp": None}, "token has no expiry"),
    ({"exp": "soon"}, "claim 'exp' of the token is no time"),
    ({"exp": float("1e300")}, "claim 'exp' of the token is no time"),
    ({"nbf": NOW_S + 31}, "token is not valid for 31 s yet"),
    ({"aud": "other"}, "another audience"),
    ({"aud": ["other", 3]}, "another audience"),
    ({"aud": None}, "another audience"),
    ({"iss": "https://other.example.org"}, "another issuer"),
    ({"sub": None}, "claim 'sub' of the token is no name"),
    ({"sub": ""}, "claim 'sub' of the token is no name"),
    ({"sub": "x" * 256}, "claim 'sub' of the token is no name"),
    ({"sub": "a\x00b"}, "claim 'sub' of the token is no name"),
    ({"sub": "a\ud800"}, "claim 'sub' of the token is no name"),
    ({"groups": ["staff", ""]}, "claim 'groups' of the token is no list"),
    ({"groups": ["a\ud800"]}, "claim 'groups' of the token is no list"),
    ({"groups": {"a": 1}}, "claim 'groups' of the token is no list"),
    ({"groups": [1]}, "claim 'groups' of the token is no list"),
    ({"groups": ["g"] * 101}, "claim 'groups' of the token is no list"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_a_token_that_says_something_wrong_is_refused(changes: dict[str, Any], text: str) -> None:
    # Encoded here, because PyJWT refuses to encode some of these claims.
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    signed = jwt.api_jws.encode(json.dumps(claims).encode(), RSA, "RS256", headers={"kid": "r"}).encode()
    assert text in refused(lambda: made().check(Password("", signed)))


def test_several_audiences_groups_in_a_text_and_a_clock_that_is_late_are_fine() -> None:
    check = made().check(Password("", token(aud=["x", "martlet"], groups="a b", nbf=NOW_S + 29)))
    check.check()
    assert check.identity.groups == ("a", "b")


def test_a_wrong_signature_another_algorithm_and_an_unknown_key_are_refused() -> None:
    tokens, other = made(), generate_rsa_key(65537, 2048)
    forged = jwt.encode(CLAIMS, other, "RS256", headers={"kid": "r"}).encode()
    for wrong in (forged, token("r", {"kid": "e"}), token("r", {"kid": "unknown"})):
        check = tokens.check(Password("", wrong))
        assert "signature of the token is wrong" in refused(check.check)
    unsigned = urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=") + b"." + token().split(b".")[1] + b"."
    symmetric = jwt.encode(CLAIMS, "s" * 32, "HS256").encode()
    for wrong in (unsigned, symmetric, token("r", {"kid": "r", "crit": ["x"]})):
        assert "token is signed with" in refused(partial(tokens.check, Password("", wrong)))


def test_a_user_who_may_not_log_in_is_refused() -> None:
    signed = token(sub="eve")
    check = made().check(Password("", signed))
    assert refused(check.check) == "user 'eve' is disabled"
    assert check.verifier != made().check(Password("", token())).verifier  # so that no proof kept before counts
    message = b"n,,\x01auth=Bearer " + signed + b"\x01\x01"
    assert refused(lambda: made().exchange()(message)) == "user 'eve' is disabled"


def test_who_makes_a_token_up_does_not_learn_who_is_disabled() -> None:
    for name in ("eve", "ann"):
        signed = token(sub=name)[:-8] + b"AAAAAAAA"
        message = b"n,,\x01auth=Bearer " + signed + b"\x01\x01"
        for call in (made().check(Password("", signed)).check, partial(made().exchange(), message)):
            assert refused(call) == "signature of the token is wrong, or its key is unknown"


def test_another_user_name_than_the_tokens_is_refused() -> None:
    assert "'bob' is not the user of the token" in refused(lambda: made().check(Password("bob", token())))


@given(st.binary(max_size=200))
def test_nonsense_is_refused(data: bytes) -> None:
    tokens = made()
    for wrong in (b"eyJ." + data + b".", data, b"e30.e30." + data, b"e30." + data + b".x", token()[:-40] + data):
        try:
            check = tokens.check(Password("", wrong))
        except Refused:
            continue
        refused(check.check)


def test_oauthbearer_proves_the_same() -> None:
    message = b"n,a=ann,\x01host=broker\x01auth=Bearer " + token() + b"\x01\x01"
    proved = made().exchange()(message)
    assert proved == Proved(Identity("ann", ("staff", "ops"), (NOW_S + 60) * 1000))


@pytest.mark.parametrize(
    "message", [b"", b"n,,\x01\x01", b"n,,\x01auth=Basic x\x01\x01", b"n,,\x01auth=Bearer x", b"p=x\x01\x01"]
)
def test_another_message_than_oauthbearers_is_refused(message: bytes) -> None:
    assert "OAUTHBEARER" in refused(lambda: made().exchange()(message))


def test_keys_are_loaded_again_and_a_withdrawn_one_ends_kept_proofs() -> None:
    file = File(jwk("r"), jwk("e"))
    tokens = Tokens(CONFIG, Now(), refusal_of, file)
    before = tokens.check(Password("", token()))
    before.check()
    assert not tokens.load()
    file.data = File(jwk("e")).data
    assert tokens.load()
    after = tokens.check(Password("", token()))
    assert after.verifier != before.verifier
    refused(after.check)
    file.data = b"{"
    with pytest.raises(ConfigError, match=r"acl.jwks 'jwks.json' is no JWKS file"):
        tokens.load()
    tokens.check(Password("", token("e"))).check()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ([], "has no public key"),
        ([{"kty": "oct", "k": "AAAA"}], "has no public key"),
        ([jwk("r", use="enc")], "has no public key"),
        ([{"kty": "RSA"}], "key 1 cannot be used"),
        ([{"kty": "?"}], "key 1 cannot be used"),
        ([jwk("r"), jwk("e", kid="r")], "two keys have the id 'r'"),
        ([{**jwk("r"), "kid": ["r"]}], "key 1 cannot be used; its kid is no text"),
        ([{**jwk("r"), "kid": {}}, {**jwk("e"), "kid": 5}], "key 2 cannot be used; its kid is no text"),
        ([jwk("e"), json.loads(RSAAlgorithm.to_jwk(RSA))], "key 2 cannot be used; it is private"),
        ([json.loads(OKPAlgorithm.to_jwk(ED))], "key 1 cannot be used; it is private"),
        ([json.loads(ECAlgorithm.to_jwk(generate_private_key(SECP384R1()).public_key()))], "key 1 is for ES384"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_of_the_configuration(keys: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Tokens(CONFIG, Now(), refusal_of, File(*keys))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b'{"keys": 5}', b'{"keys": [5]}', b"[" * 100_000, b"\xff"])
def test_a_file_that_is_no_jwks_file_is_an_error_of_the_configuration(data: bytes) -> None:
    with pytest.raises(ConfigError, match="is no JWKS file"):
        Tokens(CONFIG, Now(), refusal_of, lambda path: data)


@pytest.mark.parametrize("key", ["token_issuer", "token_audience", "token_user_claim"])
def test_issuer_and_audience_are_required(key: str) -> None:
    fields = {"jwks": "x", "token_issuer": "i", "token_audience": "a", key: ""}
    with pytest.raises(ConfigError, match=f"acl.{key} is empty"):
        Tokens(TokenConfig(**fields), Now(), refusal_of, File(jwk("r")))
