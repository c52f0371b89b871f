"""Where a cold tier is: its URL, taken apart, and the options that open it in both libraries."""

import os
from collections.abc import Mapping
from typing import Final, final
from urllib.parse import urlsplit

from martlet.errors import ConfigError
from martlet_tiered.config import TieredConfig
from martlet_tiered.credentials import Credentials, read_credentials

__all__ = ["LOCAL", "TierLocation"]

LOCAL: Final = "file"
REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")


@final
class TierLocation:
    """A store and a prefix in it. `bucket` is empty for a local directory, whose path is `prefix`."""

    __slots__ = ("_credentials", "_own", "bucket", "prefix", "scheme", "url")

    def __init__(self, url: str, credentials: Credentials, own: Mapping[str, str]) -> None:
        self.url: Final = url.rstrip("/") or "/"
        parts = urlsplit(url)
        self.scheme: Final = parts.scheme or LOCAL
        self.bucket: Final = parts.netloc
        self.prefix: Final = os.path.abspath(url) if self.scheme == LOCAL else parts.path.strip("/")
        self._credentials = credentials
        self._own = dict(own)

    def __repr__(self) -> str:
        return f"TierLocation({self.url!r}, {self._credentials!r})"

    @classmethod
    def of(cls, config: TieredConfig, environ: Mapping[str, str]) -> "TierLocation":
        """Return the location of `config.url`.

        Raises:
          ConfigError: `config.url` is empty, or credentials are missing or unsafe.
        """
        if not config.url:
            raise ConfigError("tiered.url is empty; set it to a store such as s3://BUCKET/PREFIX, or to a directory")
        scheme = urlsplit(config.url).scheme or LOCAL
        credentials = read_credentials(scheme, config.credentials_file, environ)
        if config.endpoint and scheme == "s3" and not credentials:
            raise ConfigError(
                f"tiered.endpoint {config.endpoint!r} needs credentials; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY in the environment, or tiered.credentials_file"
            )
        return cls(config.url, credentials, _options(scheme, config, environ))

    @property
    def options(self) -> dict[str, str]:
        """Options of object stores, with secrets; obstore and deltalake take the same."""
        return self._own | self._credentials.reveal()


def _options(scheme: str, config: TieredConfig, environ: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    if scheme == "s3":
        region = config.region or next((environ[name] for name in REGIONS if environ.get(name)), "us-east-1")
        options["aws_region"] = region
        options["aws_virtual_hosted_style_request"] = "false" if config.path_style else "true"
        options["aws_conditional_put"] = "etag"
    if config.endpoint:
        key = {"s3": "aws_endpoint", "gs": "google_base_url", "az": "azure_endpoint"}.get(scheme)
        if key is None:
            raise ConfigError(
                f"tiered.endpoint {config.endpoint!r} is set, but {config.url!r} has no server; remove it"
            )
        options[key] = config.endpoint
    return options
