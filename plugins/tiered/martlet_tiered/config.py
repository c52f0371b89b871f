"""The configuration section ``[tiered]``."""

from typing import Final
from urllib.parse import urlsplit

from martlet.config import Settings, setting

__all__ = ["SCHEMES", "TieredConfig", "call_deadline_s", "check_url"]

# Of URLs; an absolute path is a local directory.
SCHEMES: Final = ("s3", "gs", "az")
# Beside the time for the requests of a call with their retries.
DEADLINE_SPARE_S: Final = 60.0


def check_url(text: str) -> str:
    """Return an empty text if *text* is the URL of a store, a directory or empty; otherwise the requirement."""
    if not text or text.startswith("/"):
        return ""
    url = urlsplit(text)
    is_plain = not (url.query or url.fragment or url.username or url.password)
    if url.scheme in SCHEMES and is_plain and url.netloc:
        return ""
    return "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or an absolute path, without credentials"


def check_endpoint(text: str) -> str:
    """Return an empty text if *text* is the URL of a server or empty; otherwise the requirement."""
    url = urlsplit(text)
    is_plain = not (url.query or url.fragment or url.username or url.password)
    return "" if not text or (url.scheme in ("http", "https") and url.netloc and is_plain) else "http(s)://HOST:PORT"


class TieredConfig(Settings):
    """The cold tier: old messages in an object store, as a table that other programs can read."""

    url: str = setting(
        "",
        "where old messages go: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or an absolute directory"
        "; each broker needs a prefix of its own; empty: no cold tier",
        check=check_url,
    )
    endpoint: str = setting(
        "",
        "URL of the store's server if it is not the provider's own, such as http://127.0.0.1:9000",
        check=check_endpoint,
    )
    region: str = setting(
        "", "region of the bucket (S3); empty: that of AWS_REGION or AWS_DEFAULT_REGION, or us-east-1"
    )
    path_style: bool = setting(
        True, "true: the bucket is part of the path of requests (S3), which every store understands; false: of the host"
    )
    credentials_file: str = setting(
        "",
        "file with lines NAME=VALUE, named as the environment variables, such as AWS_ACCESS_KEY_ID; only its owner may "
        "have access (mode 0600); empty: the environment, or the role of the machine",
    )
    unsafe_single_writer: bool = setting(
        False,
        "accept a store without conditional writes: the broker cannot notice then that another one writes to its "
        "table, which loses messages; make sure that none ever does",
    )
    connect_timeout_ms: int = setting(5_000, "time for a connection to the store", unit="ms", low=10, high=60_000)
    request_timeout_ms: int = setting(
        10_000,
        "time for one request with its answer; consumers of old messages wait for it, so it is less than for uploads",
        unit="ms",
        low=10,
        high=600_000,
    )
    upload_timeout_ms: int = setting(
        120_000,
        "time for the upload of one object, of up to 256 MiB: 2 MiB/s at least",
        unit="ms",
        low=10,
        high=3_600_000,
    )
    retries_max: int = setting(
        4,
        "retries of a request that failed because the store is unreachable, hangs or is busy, after 50 ms and twice as "
        "long each time",
        low=0,
        high=20,
    )
    retry_ms: int = setting(
        20_000,
        "no retry of a request begins later than this after its first attempt",
        unit="ms",
        low=0,
        high=240_000,
    )
    cache_bytes: int = setting(
        64 << 20,
        "memory for old records, which all consumers share, in blocks of 8 MiB; up to 50 MiB more tell where they are",
        unit="bytes",
        low=0,
    )
    range_bytes: int = setting(
        256 << 20,
        "bytes of the log that become one set of files; less if the files would not fit into memory",
        unit="bytes",
        low=1 << 16,
        high=1 << 30,
    )
    range_ms: int = setting(
        600_000,
        "time after which a smaller part of the log is uploaded; its messages are only on the broker's disk so far",
        unit="ms",
        low=100,
        high=86_400_000,
    )
    deleted_hours: int = setting(
        48,
        "time within which the messages of a deleted topic are gone from the store: files that have any are written "
        "again without them; other programs may read an older version of the table for half of it",
        unit="hours",
        low=8,
        high=336,  # half of it is the 7 days for which the log of the table knows removed files
    )
    reserved_days: int = setting(
        0,
        "days for which the store keeps messages, by the day on which they were stored; whole days are removed, one an "
        "hour at most; 0: forever",
        unit="days",
        low=0,
        high=36_500,
    )
    reserved_bytes: int = setting(
        0,
        "bytes of files in the store; beyond that, the oldest day is removed, one an hour at most, never today; 0: no "
        "limit",
        unit="bytes",
        low=0,
    )
    compact_bytes: int = setting(
        8 << 20,
        "files of past days that are smaller than this become one file, of up to 24 MiB; 0: files stay as they are",
        unit="bytes",
        low=0,
        high=16 << 20,
    )


def call_deadline_s(config: TieredConfig, requests: int = 1) -> float:
    """Return the time for a call that stores an object or makes so many other *requests*, with retries, in seconds."""
    timeout_ms = max(config.upload_timeout_ms, requests * config.request_timeout_ms)
    return (timeout_ms + config.retry_ms) / 1000 + DEADLINE_SPARE_S
