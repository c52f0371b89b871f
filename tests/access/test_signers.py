"""A signer accepts exactly the signatures that HMAC-SHA1 makes; plugins answer access keys with the secrets for it."""

import hmac
from base64 import b64encode
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.delivery.pushing import broker_in_memory

from martlet.access.signers import SLICE_BYTES, Signer
from martlet.contracts import AccessKey, Credentials, Identity, LoginOrigin, Nobody, SignedRequest, SigningSecret
from martlet.errors import Reason, Refused
from martlet.plugins.loader import guarded_authenticator
from martlet.runtime.steps import Steps

ANN = Identity("ann")


def signed(secret: bytes, content: bytes) -> str:
    return b64encode(hmac.digest(secret, content, "sha1")).decode()


RIGHT = signed(b"secret", b"content")


def always(answer: Identity | SigningSecret, credentials: Credentials, origin: LoginOrigin) -> Identity | SigningSecret:
    return answer


def finish(steps: Steps[bool]) -> tuple[bool, int]:
    """Run *steps* to the end; return the result and the number of slices."""
    slices = 1
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value, slices
        slices += 1


@given(st.binary(min_size=1, max_size=200), st.lists(st.binary(max_size=100), max_size=4))
def test_a_signer_accepts_what_hmac_signs(secret: bytes, parts: list[bytes]) -> None:
    signer, content = Signer(SigningSecret(ANN, secret)), b"".join(parts)
    signature = signed(secret, content)
    assert signer.identity == ANN
    for _ in range(2):  # the copied hashes stay as they are
        assert signer.has_signed(content, signature)
        assert finish(signer.has_signed_in_slices(parts, signature)) == (True, 1)
    other = signed(secret + b"!", content)
    assert not signer.has_signed(content, other)
    assert not signer.has_signed(content + b"!", signature)
    assert finish(signer.has_signed_in_slices(parts, other)) == (False, 1)


@pytest.mark.parametrize("wrong", ["", "=", "ü", "\ud800", "A" * 28, " {}", "{}=", "{}\n"])
def test_a_signature_must_be_the_exact_text(wrong: str) -> None:
    signer = Signer(SigningSecret(ANN, b"secret"))
    assert not signer.has_signed(b"content", wrong.format(signed(b"secret", b"content")))


@pytest.mark.parametrize("size", [0, 1, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES])
def test_long_content_is_read_in_slices(size: int) -> None:
    signer, parts = Signer(SigningSecret(ANN, b"secret")), [b"head", bytes(size)]
    right, slices = finish(signer.has_signed_in_slices(parts, signed(b"secret", b"".join(parts))))
    assert right
    assert slices == (3 + size) // SLICE_BYTES + 1


async def test_an_authenticator_that_answers_a_secret_leaves_the_verifying_to_the_core() -> None:
    async with broker_in_memory() as broker:
        asked, keys, signed = broker.authentication, list[AccessKey](), SignedRequest("key", RIGHT, b"content", "t")

        def answer(credentials: Credentials, origin: LoginOrigin) -> SigningSecret | None:
            assert not isinstance(credentials, SignedRequest), "the access key was answered"
            if isinstance(credentials, AccessKey):
                keys.append(credentials)
                return SigningSecret(ANN, b"secret")
            return None

        asked.authenticators = (lambda credentials, origin: None, answer)
        assert asked.authenticate(signed, LoginOrigin()) == ANN
        assert keys == [AccessKey("key", "t")]
        for wrong in replace(signed, content=b"other"), replace(signed, signature=""):
            with pytest.raises(Refused, match="access key 'key' or the signature is wrong") as caught:
                asked.authenticate(wrong, LoginOrigin())
            assert caught.value.reason is Reason.CREDENTIALS
        assert asked.refused == 2


async def test_an_authenticator_can_refuse_an_access_key_or_verify_the_request_itself() -> None:
    async with broker_in_memory() as broker:
        asked, signed = broker.authentication, SignedRequest("key", "of another scheme", b"content")

        def verify(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
            if credentials == AccessKey("gone"):
                raise Refused(Reason.CREDENTIALS, "this key was revoked")
            return ANN if credentials == signed else None

        asked.authenticators = (verify,)
        assert asked.find_signer(AccessKey("key"), LoginOrigin()) is None
        assert asked.authenticate(signed, LoginOrigin()) == ANN
        with pytest.raises(Refused, match="this key was revoked"):
            asked.authenticate(replace(signed, access_key="gone"), LoginOrigin())
        assert asked.refused == 1


async def test_a_secret_answers_an_access_key_only_and_an_access_key_alone_proves_nobody() -> None:
    secret = SigningSecret(ANN, b"secret")
    async with broker_in_memory() as broker:
        asked = broker.authentication
        cases: list[tuple[Identity | SigningSecret, SignedRequest | Nobody]]
        cases = [(ANN, SignedRequest("key", "?", b"")), (secret, Nobody())]
        for answer, credentials in cases:
            asked.authenticators = (partial(always, answer),)
            with pytest.raises(TypeError, match="an authenticator answered"):
                asked.authenticate(credentials, LoginOrigin())
            asked.authenticators = (guarded_authenticator("users", asked.authenticators[0]),)
            with pytest.raises(Refused, match="plugin 'users' failed in its authenticator; TypeError: it returned"):
                asked.authenticate(credentials, LoginOrigin())
    with pytest.raises(ValueError, match="secret of 'ann' is empty; answer a random one for an unknown key"):
        SigningSecret(ANN, b"")


def test_a_secret_is_not_shown() -> None:
    assert "s3cret" not in repr(AccessKey("key", "s3cret")) + repr(SigningSecret(ANN, b"s3cret"))
