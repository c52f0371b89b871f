"""Verifies the signed requests of one connection."""

from collections.abc import Mapping
from typing import Final, final

from msgspec import Raw
from msgspec.structs import astuple

from martlet.access import Signer
from martlet.broker import Broker
from martlet.contracts import AccessKey, Identity, SignedRequest
from martlet.errors import RemoteProtocolError
from martlet.runtime.steps import Steps
from martlet_remoting.access.gates import ConnectionGates
from martlet_remoting.wire.headers import decode_envelope
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.runs import RunSigner
from martlet_remoting.wire.signatures import (
    ACCESS_KEY,
    SIGNATURE,
    SIGNED_BY_CODE,
    TOKEN,
    TOKEN_PLACE,
    SignedFields,
    signed_contents,
)

__all__ = ["Signers"]

# Keys that a connection remembers; clients sign with one, and proxies with one per client.
KEYS_MAX: Final = 16
KEY_CHARS_MAX: Final = 4096  # of a remembered key and its token


@final
class Signers:
    """The signers of one connection; keeps the secrets of keys that have signed, until the credentials change."""

    __slots__ = ("_authentication", "_clock", "_expires_ms", "_gates", "_generation", "_proved")

    def __init__(self, broker: Broker, gates: ConnectionGates) -> None:
        self._authentication = broker.authentication
        self._clock = broker.clock
        self._gates = gates
        self._generation = self._authentication.generation
        self._expires_ms = 0  # the first end of a proof; 0 for none
        self._proved: dict[tuple[str, str], Signer] = {}  # by access key and token

    def authenticate(self, command: Command) -> Identity:
        """Return the identity that signed *command*.

        Raises:
          Refused: the signature is wrong, or no authenticator knows its key (Reason.CREDENTIALS).
        """
        if command.raw is not None and (signer := self._signer_of_record(command, command.raw)) is not None:
            return signer.identity
        key, contents = _key_of(command), signed_contents(command)
        signer = self._find(key)
        if signer is None:
            return self._ask(command, key, contents)
        signature = command.text(SIGNATURE, "")
        for content in contents:
            if signer.has_signed(content + command.body, signature):
                return self._keep(key, signer)
        raise self._authentication.count_wrong_signature(key.access_key, self._gates.peer.login_origin())

    def authenticate_in_slices(self, command: Command) -> Steps[Identity]:
        """As `authenticate`, for a command with a long body."""
        key, contents = _key_of(command), signed_contents(command)
        signer = self._find(key)
        if signer is None:
            return self._ask(command, key, contents)
        signature = command.text(SIGNATURE, "")
        for content in contents:
            if (yield from signer.has_signed_in_slices((content, command.body), signature)):
                if self._generation != self._authentication.generation:  # somebody may have taken the key away
                    return (yield from self.authenticate_in_slices(command))
                return self._keep(key, signer)
        raise self._authentication.count_wrong_signature(key.access_key, self._gates.peer.login_origin())

    def _signer_of_record(self, command: Command, raw: Raw) -> Signer | None:
        """Return who signed a frequent request, whose fields *raw* its handler will decode as a record."""
        self._forget_old()
        try:
            return self._signer_of_texts(astuple(SIGNED_BY_CODE[command.code].decode(raw)), command.body)
        except (ValueError, RecursionError):
            return None

    # runs

    def begin_run(self) -> bool:
        """Return whether unsigned requests may be in a run: whether it is known who they are from."""
        self._forget_old()
        return self._gates.own_gate is not None

    def is_current(self, signer: RunSigner | None) -> bool:
        """Return whether requests of *signer* may still be handled as a run."""
        if signer is None:
            return self._gates.own_gate is not None
        self._forget_old()
        return signer in self._proved.values()

    def signer_of(self, kind: SignedFields, header: bytes, body: bytes) -> Signer | None:
        """Return who signed a request with an access key and a JSON header.

        None if the signature is wrong, or is the first one by its key: `authenticate` finds out.
        """
        try:
            texts = astuple(kind.decode_header(header).extFields)
        except (ValueError, RecursionError):
            return self._signer_of_unusual(header, body)
        return self._signer_of_texts(texts, body)

    def _signer_of_texts(self, texts: tuple[str, ...], body: bytes) -> Signer | None:
        """Return who signed a request with the fields *texts*, as `SignedFields` orders them."""
        token, signature = texts[TOKEN_PLACE], texts[-1]
        signer = self._proved.get((texts[0], token))
        if signer is None:
            return None
        if signer.has_signed("".join(texts[:-1]).encode() + body, signature):
            return signer
        if not token:
            return None
        content = "".join(texts[:TOKEN_PLACE] + texts[TOKEN_PLACE + 1 : -1]).encode() + body
        return signer if signer.has_signed(content, signature) else None

    def _signer_of_unusual(self, header: bytes, body: bytes) -> Signer | None:
        try:
            envelope = decode_envelope(header)
            ext = Command(envelope.code, raw=envelope.fields).ext
        except (ValueError, RecursionError, RemoteProtocolError):
            return None
        return self.signer_of_fields(ext, envelope.version, body)

    def signer_of_fields(self, ext: Mapping[str, object], version: int, body: bytes) -> Signer | None:
        """As `signer_of`, for the fields of a binary header."""
        command = Command(0, ext, body, version=version)
        signer = self._proved.get((command.text(ACCESS_KEY, ""), command.text(TOKEN, "")))
        if signer is None:
            return None
        signature = command.text(SIGNATURE, "")
        for content in signed_contents(command):
            if signer.has_signed(content + body, signature):
                return signer
        return None

    def _forget_old(self) -> None:
        """Forget all signers if the credentials have changed, or if an identity has expired."""
        generation = self._authentication.generation
        if generation != self._generation or (self._expires_ms and self._clock.now_ms() >= self._expires_ms):
            self._generation, self._expires_ms = generation, 0
            self._proved.clear()

    def _find(self, key: AccessKey) -> Signer | None:
        self._forget_old()
        signer = self._proved.get((key.access_key, key.token))
        if signer is not None:
            return signer
        origin = self._gates.peer.login_origin()
        signer = self._authentication.find_signer(key, origin)
        if signer is not None and self._authentication.has_expired(signer.identity):
            raise self._authentication.count_wrong_signature(key.access_key, origin)
        return signer

    def _keep(self, key: AccessKey, signer: Signer) -> Identity:
        """Keep *signer*, whose signature was right: nobody without a key can make a connection remember anything."""
        proved, name = self._proved, (key.access_key, key.token)
        if name not in proved and len(key.access_key) + len(key.token) <= KEY_CHARS_MAX:
            if len(proved) >= KEYS_MAX:
                proved.clear()
            proved[name] = signer
            if expires_ms := signer.identity.expires_ms:
                self._expires_ms = min(self._expires_ms or expires_ms, expires_ms)
        return signer.identity

    def _ask(self, command: Command, key: AccessKey, contents: list[bytes]) -> Identity:
        """Let the authenticators verify the signature themselves."""
        content, *without_token = (content + command.body for content in contents)
        signature = command.text(SIGNATURE, "")
        signed = SignedRequest(key.access_key, signature, content, key.token, b"".join(without_token))
        return self._authentication.authenticate(signed, self._gates.peer.login_origin())


def _key_of(command: Command) -> AccessKey:
    return AccessKey(command.text(ACCESS_KEY), command.text(TOKEN, ""))
