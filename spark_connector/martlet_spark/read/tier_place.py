"""Where the table of a broker's cold tier is, as the options of a query say.

The packages that read it (obstore, deltalake) are imported on first use: a query that reads brokers alone needs none.
Credentials are not part of a place. Each process takes them from its environment or from a file, as the broker does.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, final

from martlet.errors import ConfigError
from martlet_spark.errors import OptionError, ReadError
from martlet_tiered.config import check_endpoint
from martlet_tiered.errors import TierError

if TYPE_CHECKING:
    from martlet_tiered.config import TieredConfig
    from martlet_tiered.objects import Objects
    from martlet_tiered.opened_table import OpenedTable

__all__ = ["TierPlace", "plain_errors"]

ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# The broker's settings in texts of errors -> the options of a query.
OPTIONS: Final = {
    "url": "tierUrl",
    "endpoint": "tierEndpoint",
    "region": "tierRegion",
    "credentials_file": "tierCredentialsFile",
}
SETTING: Final = re.compile(rf"\btiered\.({'|'.join(OPTIONS)})\b")


@final
@dataclass(frozen=True, slots=True)
class TierPlace:
    """The place of one broker's cold tier: its ``tiered.url``, and how to reach that."""

    url: str
    endpoint: str = ""  # URL of the store's server if it is not the provider's own
    region: str = ""
    credentials_file: str = ""

    @classmethod
    def of(cls, urls: Sequence[str], endpoint: str, region: str, credentials_file: str) -> "tuple[TierPlace, ...]":
        """Return a place for each of *urls*; without *endpoint*, the environment says which server S3 is.

        Raises:
          OptionError: the environment has no URL of a server, or one with credentials, which tasks would get.
        """
        name = next((name for name in ENDPOINTS if os.environ.get(name)), "")
        found = endpoint or os.environ.get(name, "")
        problem = check_endpoint(found) if any(url.startswith("s3://") for url in urls) else ""
        if problem:
            raise OptionError(f"the environment's {name} is no URL of a server without credentials; write {problem}")
        return tuple(cls(url, found if url.startswith("s3://") else endpoint, region, credentials_file) for url in urls)

    def open(self) -> "OpenedTable":
        """Return the table as it is now.

        Raises:
          TierError: it cannot be read.
          ConfigError: credentials are missing.
        """
        from martlet_tiered.opened_table import open_table

        return open_table(self._config())

    def objects(self) -> "Objects":
        """Return the objects at this place, one for all reads of this process. Raises what `open` raises."""
        return _objects(self)

    def _config(self) -> "TieredConfig":
        from martlet_tiered.config import TieredConfig

        return TieredConfig(
            url=self.url, endpoint=self.endpoint, region=self.region, credentials_file=self.credentials_file
        )


@cache
def _objects(place: TierPlace) -> "Objects":
    from martlet_tiered.location import TierLocation
    from martlet_tiered.opened_table import objects_for_reads

    config = place._config()
    return objects_for_reads(TierLocation.of(config, os.environ), config)


@contextmanager
def plain_errors(*others: type[TierError]) -> Iterator[None]:
    """Turn errors of a cold tier, but for *others*, into those of a query, with the names of its options.

    Raises:
      OptionError: an option is wrong, or a package is missing.
      ReadError: the table cannot be read.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise OptionError(f"option tierUrl needs the package {error.name!r}; pip install 'martlet[tiered]'") from error
    except ConfigError as error:
        raise OptionError(_with_options(str(error))) from None
    except TierError as error:
        if isinstance(error, others):
            raise
        raise ReadError(_with_options(str(error))) from None


def _with_options(text: str) -> str:
    return SETTING.sub(lambda match: OPTIONS[match[1]], text)
