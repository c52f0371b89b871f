"""Passwords that were proved right: a second login of the same user needs no hash.

A password hash is slow by design, and clients log in again whenever a network breaks. The cache holds no password: its
keys are keyed hashes under a random key of this process, over the user, the password and the stored verifier. So a
changed password makes the entry worthless, and a memory dump without the key does not allow guessing faster.
"""

import hmac
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, final

import trio

__all__ = ["ProofCache"]

PROOFS_MAX: Final = 100_000
LIFETIME_S: Final = 3600.0


@final
class ProofCache:
    """The last proved password of each user, as a hash under a random *key*; for the event loop only."""

    def __init__(self, key: bytes, clock: Callable[[], float] = trio.current_time) -> None:
        self._key = key
        self._clock = clock
        self._proofs: OrderedDict[str, tuple[bytes, float]] = OrderedDict()

    def key_of(self, user: str, password: bytes, verifier: bytes) -> bytes:
        """Return the keyed hash of *password*, which the *verifier* stored for *user* accepts."""
        parts = (user.encode("utf-8", "surrogatepass"), password, verifier)
        content = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, content, "sha256")

    def has(self, user: str, key: bytes) -> bool:
        """Whether *key* is that of the last proved password of *user*."""
        proof = self._proofs.get(user)
        if proof is None or proof[1] <= self._clock():
            self._proofs.pop(user, None)
            return False
        return hmac.compare_digest(proof[0], key)

    def add(self, user: str, key: bytes) -> None:
        """Remember a proved password for an hour; the longest known ones go first where there are too many."""
        self._proofs.pop(user, None)
        if len(self._proofs) >= PROOFS_MAX:
            self._proofs.popitem(last=False)
        self._proofs[user] = key, self._clock() + LIFETIME_S

    def forget(self, user: str) -> None:
        """Forget the proved password of *user*, who changed it or was disabled."""
        self._proofs.pop(user, None)

    def clear(self) -> None:
        self._proofs.clear()

    def __len__(self) -> int:
        return len(self._proofs)
