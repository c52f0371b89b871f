"""Verifies the signed requests of one connection."""

from typing import Final, final

from martlet.access import Authentication, Signer
from martlet.contracts import AccessKey, Identity, LoginOrigin, SignedRequest
from martlet.runtime.steps import Steps
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import ACCESS_KEY, SIGNATURE, TOKEN, signed_contents

__all__ = ["Signers"]

# Keys that a connection remembers; clients sign with one, and proxies with one per client.
KEYS_MAX: Final = 16
KEY_CHARS_MAX: Final = 4096  # of a remembered key and its token


@final
class Signers:
    """The signers of one connection; keeps the secrets of keys that have signed, until the credentials change."""

    __slots__ = ("_authentication", "_generation", "_origin", "_proved")

    def __init__(self, authentication: Authentication, origin: LoginOrigin) -> None:
        self._authentication = authentication
        self._origin = origin
        self._generation = authentication.generation
        self._proved: dict[tuple[str, str], Signer] = {}  # by access key and token

    def authenticate(self, command: Command) -> Identity:
        """Return the identity that signed *command*.

        Raises:
          Refused: the signature is wrong, or no authenticator knows its key (Reason.CREDENTIALS).
        """
        key, contents = _key_of(command), signed_contents(command)
        signer = self._find(key)
        if signer is None:
            return self._ask(command, key, contents)
        signature = command.text(SIGNATURE, "")
        for content in contents:
            if signer.has_signed(content + command.body, signature):
                return self._keep(key, signer)
        raise self._authentication.count_wrong_signature(key.access_key, self._origin)

    def authenticate_in_slices(self, command: Command) -> Steps[Identity]:
        """As `authenticate`, for a command with a long body."""
        key, contents = _key_of(command), signed_contents(command)
        signer = self._find(key)
        if signer is None:
            return self._ask(command, key, contents)
        signature = command.text(SIGNATURE, "")
        for content in contents:
            if (yield from signer.has_signed_in_slices((content, command.body), signature)):
                return self._keep(key, signer)
        raise self._authentication.count_wrong_signature(key.access_key, self._origin)

    def _find(self, key: AccessKey) -> Signer | None:
        if self._generation != self._authentication.generation:
            self._generation = self._authentication.generation
            self._proved.clear()
        signer = self._proved.get((key.access_key, key.token))
        return signer if signer is not None else self._authentication.find_signer(key, self._origin)

    def _keep(self, key: AccessKey, signer: Signer) -> Identity:
        """Keep *signer*, whose signature was right: nobody without a key can make a connection remember anything."""
        proved, name = self._proved, (key.access_key, key.token)
        if name not in proved and len(key.access_key) + len(key.token) <= KEY_CHARS_MAX:
            if len(proved) >= KEYS_MAX:
                proved.clear()
            proved[name] = signer
        return signer.identity

    def _ask(self, command: Command, key: AccessKey, contents: list[bytes]) -> Identity:
        """Let the authenticators verify the signature themselves."""
        content, *without_token = (content + command.body for content in contents)
        signature = command.text(SIGNATURE, "")
        signed = SignedRequest(key.access_key, signature, content, key.token, b"".join(without_token))
        return self._authentication.authenticate(signed, self._origin)


def _key_of(command: Command) -> AccessKey:
    return AccessKey(command.text(ACCESS_KEY), command.text(TOKEN, ""))
