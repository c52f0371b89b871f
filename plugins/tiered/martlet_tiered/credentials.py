"""Credentials of object stores, from the environment or from a file that only its owner can read."""

import os
import stat
from collections.abc import Mapping
from typing import Final, final

from martlet.errors import ConfigError

__all__ = ["Credentials", "read_credentials"]

# The names of the environment variables, by the scheme of the URL; in lower case they are options of both libraries.
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_STORAGE_TENANT_ID",
    ),
}


@final
class Credentials:
    """Options with secrets; their values are in no repr."""

    __slots__ = ("_options",)

    def __init__(self, values: Mapping[str, str]) -> None:
        self._options = {name.lower(): value for name, value in values.items()}

    def __repr__(self) -> str:
        return f"Credentials({', '.join(sorted(self._options))})"

    def __bool__(self) -> bool:
        return bool(self._options)

    def reveal(self) -> dict[str, str]:
        """Return the options with their values, for the libraries alone."""
        return dict(self._options)


def _read_private(path: str) -> str:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"tiered.credentials_file {path!r} is open to other users; run: chmod 600 {path}")
            return file.read().decode()
    except OSError as error:
        raise ConfigError(f"tiered.credentials_file {path!r} cannot be read; {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"tiered.credentials_file {path!r} is not UTF-8; write it as text") from None


def _parse(path: str, text: str, names: tuple[str, ...]) -> dict[str, str]:
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or name.strip() not in names or not value.strip():
            raise ConfigError(
                f"tiered.credentials_file {path!r} has no NAME=VALUE in line {number}; names are {', '.join(names)}"
            )
        values[name.strip()] = value.strip()
    if not values:
        raise ConfigError(f"tiered.credentials_file {path!r} is empty; write lines NAME=VALUE: {', '.join(names)}")
    return values


def read_credentials(scheme: str, path: str, environ: Mapping[str, str]) -> Credentials:
    """Return the credentials for a store with URLs of *scheme*, from the file *path*, else from *environ*.

    Raises:
      ConfigError: the file cannot be read, other users can read it, or it has wrong lines; or the environment has
        credentials beside it, which the libraries would mix with those of the file.
    """
    names = NAMES.get(scheme, ())
    found = {name: environ[name] for name in names if environ.get(name)}
    if not path:
        return Credentials(found)
    if not names:
        raise ConfigError(f"tiered.credentials_file {path!r} is set, but a local directory needs none; remove it")
    if found:
        raise ConfigError(f"tiered.credentials_file {path!r} is set, and so is {next(iter(found))}; remove one of them")
    return Credentials(_parse(path, _read_private(path), names))
