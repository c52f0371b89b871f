"""What users prove their identity with, as it is stored in ``config/acl.secrets``: verifiers and access keys.

Signatures are HMACs, for which the broker needs the secret itself, so this file must not be readable by others.
"""

from typing import Final, final

from msgspec import Struct

from martlet_acl.passwords import parse_verifier
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.subjects import check_key_name

__all__ = ["KEYS_MAX", "SecretKey", "UserSecrets", "check_secret", "check_secrets"]

KEYS_MAX: Final = 16  # of one user: an old and a new one while they are rotated, for some programs
SECRET_MIN, SECRET_MAX = 8, 1024


@final
class SecretKey(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The secret of an access key."""

    secret: str
    disabled: bool = False

    def __repr__(self) -> str:
        return f"SecretKey(disabled={self.disabled!r})"


@final
class UserSecrets(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All secrets of a user.

    Args:
      version: of the files when these were changed; never decreases.
      password: the text of a verifier; empty if the user has no password.
      keys: by the name of the access key.
    """

    version: int = 0
    password: str = ""
    keys: dict[str, SecretKey] = {}

    def __repr__(self) -> str:
        return f"UserSecrets(version={self.version!r})"


def check_secrets(secrets: UserSecrets) -> None:
    """Raise `PolicyError` unless *secrets* are valid; the error has no secret in it."""
    if secrets.password:
        try:
            parse_verifier(secrets.password)
        except PolicyError as error:
            raise error.inside("password") from None
    if len(secrets.keys) > KEYS_MAX:
        raise PolicyError(f"there are {len(secrets.keys)} access keys; a user has {KEYS_MAX} at most")
    for name, key in secrets.keys.items():
        try:
            check_key_name(name)
            check_secret(key.secret)
        except PolicyError as error:
            raise error.inside(f"access key {name}") from None


def check_secret(secret: str) -> None:
    """Raise `PolicyError` unless *secret* can be that of an access key."""
    if not SECRET_MIN <= len(secret) <= SECRET_MAX:
        text = f"a secret has {SECRET_MIN} to {SECRET_MAX} characters"
        raise PolicyError(f"the secret has {len(secret)} characters; {text}")
    if not secret.isprintable():
        raise PolicyError("the secret has a control character")
