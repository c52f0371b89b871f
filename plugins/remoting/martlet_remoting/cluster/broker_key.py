"""The key with which this broker proves itself to remote name servers."""

import logging
from typing import Final, final

from martlet.config import read_private_secret
from martlet.errors import ConfigError
from martlet_remoting.config import RemotingConfig
from martlet_remoting.wire.signatures import SigningKey

__all__ = ["BrokerKey"]

log = logging.getLogger("martlet.remoting.registration")

NAME: Final = "remoting.nameservers_key"
FILE: Final = "remoting.nameservers_secret_file"


@final
class BrokerKey:
    """The configured key; `signing_key` is None if there is none.

    Raises:
      ConfigError: only one of both settings has a value, or the file is missing, empty or readable by every user.
    """

    def __init__(self, config: RemotingConfig) -> None:
        self._name = config.nameservers_key
        self._path = config.nameservers_secret_file
        self.signing_key: SigningKey | None = self._load()

    def _load(self) -> SigningKey | None:
        if not self._name and not self._path:
            return None
        if not self._name or not self._path:
            there, missing = (NAME, FILE) if self._name else (FILE, NAME)
            raise ConfigError(f"config key '{there}' has a value, but '{missing}' is empty; set both or none")
        try:
            return SigningKey(self._name, read_private_secret(self._path))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"config key '{FILE}': {error}") from error

    def reload(self) -> None:
        """Read the secret again, for the next request."""
        try:
            self.signing_key = self._load()
        except ConfigError as error:
            log.error("the secret for name servers cannot be reloaded, keeping the old one; %s", error)

    @property
    def advice(self) -> str:
        """The advice in the log if a name server refuses this broker."""
        if self.signing_key is None:
            return f"set {NAME} and {FILE} to a user who may update the cluster there"
        return f"user {self._name!r} of {NAME} must have the secret in {self._path!r} there, and may update the cluster"
