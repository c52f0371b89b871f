"""A proved password needs no second hash, until it changes or an hour is over."""

import pytest

from martlet.access import proofs
from martlet.access.proofs import LIFETIME_S, ProofCache


class Now:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_only_the_same_password_and_verifier_of_the_same_user_are_known() -> None:
    cache = ProofCache(b"key", Now())
    key = cache.key_of("ann", b"secret", b"hash")
    cache.add("ann", key)
    assert cache.has("ann", cache.key_of("ann", b"secret", b"hash"))
    for user, password, verifier in (
        ("ann", b"Secret", b"hash"),
        ("ann", b"secret", b"new hash"),
        ("bob", b"secret", b"hash"),
        ("ann", b"secreth", b"ash"),
    ):
        assert not cache.has(user, cache.key_of(user, password, verifier))
    assert not cache.has("bob", key)


def test_a_proof_is_forgotten_after_an_hour_and_on_request() -> None:
    now = Now()
    cache = ProofCache(b"key", now)
    key = cache.key_of("ann", b"secret", b"hash")
    cache.add("ann", key)
    now.s += LIFETIME_S - 1
    assert cache.has("ann", key)
    now.s += 1
    assert not cache.has("ann", key)
    assert len(cache) == 0
    cache.add("ann", key)
    cache.forget("ann")
    assert not cache.has("ann", key)


def test_the_longest_known_proofs_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "PROOFS_MAX", 2)
    cache = ProofCache(b"key", Now())
    for user in ("ann", "bob", "ann", "eve"):
        cache.add(user, cache.key_of(user, b"x", b"y"))
    assert [user for user in ("ann", "bob", "eve") if cache.has(user, cache.key_of(user, b"x", b"y"))] == ["ann", "eve"]


def test_a_cache_holds_no_password() -> None:
    cache = ProofCache(b"key", Now())
    cache.add("ann", cache.key_of("ann", b"secret", b"hash"))
    assert b"secret" not in repr(cache._proofs).encode()
    assert cache.key_of("ann", b"secret", b"hash") != ProofCache(b"other key", Now()).key_of("ann", b"secret", b"hash")
