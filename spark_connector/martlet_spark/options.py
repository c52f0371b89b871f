"""The options of the source and the sink: names, types, limits and defaults; the documentation's tables show them.

Options that Spark's Kafka source has too have its names. Spark passes all values as text, and all names in lower case.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Any, Final, TypeVar, final

from martlet_remoting.wire.signatures import SigningKey
from martlet_spark.columns import DEFAULT, select
from martlet_spark.connection import Security
from martlet_spark.errors import OptionError
from martlet_tiered.config import check_endpoint, check_url

__all__ = [
    "AT_LEAST_ONCE",
    "BATCH",
    "CLUSTER",
    "EXACTLY_ONCE",
    "IDEMPOTENT",
    "SELECTION",
    "SINK",
    "SOURCE",
    "START",
    "STREAM",
    "TIER",
    "Option",
    "Options",
    "named",
    "parse",
]

T = TypeVar("T")
TIME_HINT: Final = "write milliseconds since 1970, such as 1700000000000"
TIME_FORMS: Final = "2026-03-01T12:00 (local time), 2026-03-01T12:00+01:00, -2h (two hours ago) or 1700000000000 (ms)"
AGO_S: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
SIZES: Final = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
CREDENTIALS: Final = re.compile("://.*@")  # in URLs
TIMES_MS: Final = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000}


@final
@dataclass(frozen=True, slots=True)
class Option:
    """One option: *parse* turns its text into a value, or raises ValueError with the reason."""

    name: str
    parse: Callable[[str], Any]
    default: object
    text: str
    example: str = ""


def _list(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in re.split("[,;]", text) if part.strip())
    if not found:
        raise ValueError("is empty")
    return found


def _address_list(text: str) -> tuple[str, ...]:
    found = _list(text)
    for address in found:
        if "://" in address:
            raise ValueError(f"has the address {address!r} with a scheme; write {address.partition('://')[2]}")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"has the address {address!r}; write HOST:PORT of a name server, such as 127.0.0.1:9876")
    return found


def _integer(low: int, high: int = (1 << 62)) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("is not a whole number") from None
        if not low <= value <= high:
            raise ValueError(f"is not between {low} and {high}")
        return value

    return parse


def _unit(units: Mapping[str, int], what: str, low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
        if match is None or match[2] not in units:
            raise ValueError(f"is not {what}")
        value = int(match[1]) * units[match[2]]
        if value < low:
            raise ValueError(f"is less than {low}")
        return value

    return parse


_bytes = _unit(SIZES, "a size such as 4m, 512k or 1048576", 1)
_ms = _unit(TIMES_MS, "a time such as 500ms, 30s or 15m", 0)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("is neither true nor false")
    return text.lower() == "true"


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"is none of {', '.join(choices)}")
        return text.lower()

    return parse


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return text


def _queues_of(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise ValueError('is not JSON such as {"Orders": {"0": 23, "1": -2}}')
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _numbers(text: str) -> dict[str, dict[str, int]]:
    """Parse ``{"Orders": {"0": 23, "broker-a/1": -2}}``."""
    value = _queues_of(_json(text))
    for topic, queues in value.items():
        for name, number in queues.items():
            if type(number) is not int:
                raise ValueError(f"has no number for queue {name} of {topic!r}")
            if not name.rpartition("/")[2].isdecimal():
                raise ValueError(f"names the queue {name!r}; write its number, or BROKER/NUMBER")
    return value


def _times(text: str) -> dict[str, dict[str, int]]:
    """Parse ``{"Orders": {"0": 1700000000000}}``."""
    value = _numbers(text)
    for topic, queues in value.items():
        for name, number in queues.items():
            if number < 0:
                raise ValueError(f"has the time {number} for queue {name} of {topic!r}; {TIME_HINT}")
    return value


def _time(text: str) -> int:
    """Parse milliseconds since 1970, a time in ISO 8601, or an age such as ``-2h``."""
    text = text.strip()
    if text.isdecimal():
        return int(text)
    ago = re.fullmatch(r"-\s*(\d{1,9})\s*(s|m|min|h|d)", text.lower())
    if ago is not None:
        return max(time.time_ns() // 1_000_000 - int(ago[1]) * AGO_S[ago[2]] * 1000, 0)
    try:
        return max(int(datetime.fromisoformat(text).timestamp() * 1000), 0)
    except (ValueError, OverflowError):
        raise ValueError(f"is not a time; write {TIME_FORMS}") from None


def _offsets(*words: str) -> Callable[[str], object]:
    def parse(text: str) -> object:
        if text.lower() in words:
            return text.lower()
        if not text.lstrip().startswith("{"):
            raise ValueError(f'is neither {" nor ".join(words)} nor JSON such as {{"Orders": {{"0": 23}}}}')
        return _numbers(text)

    return parse


def _assign(text: str) -> dict[str, tuple[str, ...]]:
    value = _json(text)
    if not isinstance(value, dict) or not value or not all(isinstance(each, list) for each in value.values()):
        raise ValueError('is not JSON such as {"Orders": [0, 1]}')
    for topic, queues in value.items():
        if not queues:
            raise ValueError(f"names no queue of {topic!r}; name some, or use the option subscribe")
        for name in queues:
            if not str(name).rpartition("/")[2].isdecimal():
                raise ValueError(f"names the queue {name!r} of {topic!r}; write its number, or BROKER/NUMBER")
    return {topic: tuple(map(str, queues)) for topic, queues in value.items()}


def _tier_urls(text: str) -> tuple[str, ...]:
    found = _list(text)
    for url in found:
        problem = check_url(url)
        if problem:
            what = "a URL with credentials" if CREDENTIALS.search(url) else repr(url)
            raise ValueError(f"has {what}; write {problem}")
    return tuple(url.rstrip("/") or "/" for url in found)


def _tier_endpoint(text: str) -> str:
    problem = check_endpoint(text)
    if problem:
        raise ValueError(f"is no URL of a server without credentials; write {problem}")
    return text


def _secret(text: str) -> str:
    """Return the secret that *text* refers to: a secret in the option itself would show in Spark's user interface."""
    kind, _, name = text.partition(":")
    if kind == "env" and name:
        if name not in os.environ:
            raise ValueError(f"refers to the environment variable {name}, which is not set on the driver")
        return os.environ[name]
    if kind == "file" and name:
        try:
            with open(name, encoding="utf-8") as file:
                return file.read().strip()
        except OSError as error:
            raise ValueError(f"refers to the file {name}, which cannot be read: {error.strerror}") from None
    raise ValueError("is no reference; write env:NAME or file:PATH, so that the secret itself is shown nowhere")


def _name(text: str) -> str:
    if not 1 <= len(text) <= 255 or not text.isprintable():
        raise ValueError("has no or over 255 characters, or unprintable ones")
    return text


def _columns(text: str) -> tuple[str, ...]:
    return select(_list(text))


def _same(text: str) -> str:
    return text


CLUSTER: Final = (
    Option("endpoints", _address_list, None, "the name servers; required", "127.0.0.1:9876"),
    Option("timeoutMs", _ms, 60_000, "how long to try again when a server does not answer", "30s"),
    Option("tls", _boolean, False, "encrypt connections; implied by the other options that begin with tls"),
    Option("tlsCa", _same, "", "PEM file with the trusted certificate authorities; default: the system's"),
    Option("tlsCert", _same, "", "PEM file with the client's certificate chain"),
    Option("tlsKey", _same, "", "PEM file with the private key, if tlsCert does not contain it"),
    Option("tlsInsecure", _boolean, False, "accept any server certificate: protects against eavesdropping only"),
    Option("accessKey", _same, "", "name of the user who signs requests"),
    Option("secretKey", _secret, "", "the user's secret, by reference", "env:MARTLET_SECRET or file:/run/secret"),
)
# Options of the connection, and of the topics and queues to read; exactly one of the latter is given.
SELECTION: Final = (
    *CLUSTER,
    Option("subscribe", _list, (), "topics, separated by commas", "Orders,Payments"),
    Option("subscribePattern", _pattern, "", "regular expression for topics, also those created later", "Orders-.*"),
    Option("assign", _assign, None, "queues of topics", '{"Orders": [0, 1]}'),
)
# Options that say where to begin; at most one is given.
START: Final = (
    Option(
        "startingOffsets",
        _offsets("earliest", "latest"),
        None,
        "where to begin; -2 is earliest, -1 latest. Default: earliest for a batch, latest for a stream",
        '{"Orders": {"0": 23, "1": -2}}',
    ),
    Option(
        "startingTimestamp",
        _time,
        None,
        "begin with the first message stored then or later: a time (without an offset, the driver's), how long ago, or "
        "ms since 1970",
        "2026-03-01T12:00, -2h",
    ),
    Option("startingOffsetsByTimestamp", _times, None, "the same per queue", '{"Orders": {"0": 1700000000000}}'),
)
# Options of the cold tier, from which old messages can be read without a broker.
TIER: Final = (
    Option(
        "tier",
        _choice("auto", "hot", "cold"),
        "auto",
        "read old messages from the tables at tierUrl and the others from brokers (auto; without tierUrl all from "
        "brokers), all from brokers (hot), or tables alone (cold)",
    ),
    Option(
        "tierUrl",
        _tier_urls,
        (),
        "the `tiered.url` of each broker's cold tier, separated by commas",
        "s3://lake/broker-a",
    ),
    Option(
        "tierEndpoint",
        _tier_endpoint,
        "",
        "URL of the store's server if it is not the provider's own; for S3 the default is "
        "`AWS_ENDPOINT_URL` of the driver",
        "http://127.0.0.1:9000",
    ),
    Option("tierRegion", _same, "", "region of the bucket; default: that of `AWS_REGION`, or us-east-1"),
    Option(
        "tierCredentialsFile",
        _same,
        "",
        "file with credentials, as `tiered.credentials_file`; default: the environment of each process, or the role of "
        "the machine",
    ),
)
SOURCE: Final = (
    *SELECTION,
    *TIER,
    Option("columns", _columns, DEFAULT, "columns to read; others are not decoded", "topic,offset,body,properties"),
    Option("tags", _same, "", "read only messages with one of these tags", "paid || sent"),
    Option("sql", _same, "", "read only messages whose properties match this SQL92 expression", "amount > 100"),
    Option("key", _same, "", "read only messages with this key", "order-4711"),
    *START,
    Option(
        "startingOffsetsByTimestampStrategy",
        _choice("error", "latest"),
        "error",
        "for queues without a message at that time or later: fail, or begin at their end",
    ),
    Option("failOnDataLoss", _boolean, True, "fail if messages that were not read yet are gone; otherwise warn"),
    Option(
        "undecodableBody",
        _choice("error", "null", "raw"),
        "",
        "a body that cannot be decompressed: fail (error), null, or as stored (raw). Default: error, or null with "
        "failOnDataLoss=false",
    ),
    Option("minPartitions", _integer(1), 0, "lowest number of Spark partitions, if there are that many messages"),
    Option("maxRecordsPerPartition", _integer(1), 0, "most messages in one Spark partition"),
    Option("targetPartitionBytes", _bytes, 64 << 20, "size of a Spark partition; smaller queues share one", "64m"),
    Option("fetchBytes", _bytes, 16 << 20, "how much a task asks a broker for at once; brokers have limits too", "4m"),
)
BATCH: Final = (
    *SOURCE,
    Option(
        "endingOffsets",
        _offsets("latest"),
        None,
        "where to end, exclusive; -1 is latest, the default",
        '{"Orders": {"0": 42}}',
    ),
    Option("endingTimestamp", _time, None, "end before the first message stored then or later", "2026-03-02, -1d"),
    Option("endingOffsetsByTimestamp", _times, None, "the same per queue", '{"Orders": {"0": 1700000000000}}'),
)
STREAM: Final = (
    *SOURCE,
    Option("maxOffsetsPerTrigger", _integer(1), 0, "most messages in one micro-batch"),
    Option("maxBytesPerTrigger", _bytes, 0, "about the size of one micro-batch, at most", "1g"),
    Option("minOffsetsPerTrigger", _integer(1), 0, "begin a micro-batch with so many, or after maxTriggerDelay"),
    Option("maxTriggerDelay", _ms, 900_000, "longest wait for minOffsetsPerTrigger", "15m"),
    Option("pollMs", _ms, 500, "how long a request for new messages waits for one"),
    Option("group", _same, "", "consumer group whose progress brokers show; the query itself uses its checkpoint only"),
)
# Values of the option `guarantee`.
EXACTLY_ONCE: Final = "exactly-once"
IDEMPOTENT: Final = "idempotent"
AT_LEAST_ONCE: Final = "at-least-once"
SINK: Final = (
    *CLUSTER,
    Option("topic", _same, "", "the topic to write to; replaces the column topic", "Orders"),
    Option(
        "guarantee",
        _choice(EXACTLY_ONCE, IDEMPOTENT, AT_LEAST_ONCE),
        EXACTLY_ONCE,
        "exactly-once, idempotent or at-least-once, see below",
    ),
    Option(
        "txnAppId",
        _name,
        "",
        "in batches, as within foreachBatch: a name of the transactions; with txnVersion each is written once",
        "orders-per-minute",
    ),
    Option("txnVersion", _integer(0, (1 << 63) - 1), None, "number of the transaction; it rises, as a batch's", "7"),
    Option(
        "changingRows",
        _boolean,
        False,
        "a batch that is repeated after its commit may have other rows, as with rand(): keep those that were written",
    ),
    Option(
        "batchBytes",
        _bytes,
        1 << 20,
        "most bytes in one request, unless a message alone has more; at most the brokers' limit of a message",
        "512k",
    ),
    Option(
        "retiredBrokers",
        _list,
        (),
        "brokers that are gone for good, with what was written to them: do not ask them what the query has written",
        "broker-a,broker-b",
    ),
)


@final
class Options:
    """Parsed options: ``options["maxOffsetsPerTrigger"]`` is the value, or the option's default if it is not given."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def get(self, name: str) -> Any:
        """Return the value of an option, None if it is none of those that were parsed."""
        return self._values.get(name)

    @property
    def security(self) -> Security:
        """TLS and the user."""
        key = SigningKey(self["accessKey"], self["secretKey"]) if self["accessKey"] else None
        tls = self["tls"] or self["tlsInsecure"] or bool(self["tlsCa"] or self["tlsCert"] or self["tlsKey"])
        verify = not self["tlsInsecure"]
        return Security(tls, self["tlsCa"], self["tlsCert"], self["tlsKey"], verify, key)


def parse(given: Mapping[str, str], known: tuple[Option, ...], ignored: tuple[str, ...] = ()) -> Options:
    """Return the values of the options *given*, whose names may be in lower case.

    Raises:
      OptionError: an option is unknown or invalid, options contradict one another, or ``endpoints`` is missing.
    """
    if "provider" in given:  # from Spark, for a table
        raise OptionError("a table with USING martlet loses its options in Spark; use CREATE TEMPORARY VIEW instead")
    lower = {name.lower(): value for name, value in given.items()}
    if "endpoints" not in lower and lower.get("tier", "").lower() != "cold":
        text = "option endpoints is missing; give the name servers, such as 127.0.0.1:9876"
        # If a table was created with columns, Spark does not ask for its schema, and loses its options too.
        raise OptionError(
            text if given else f"{text}; for a SQL table, give it in each statement: WITH (endpoints '...')"
        )
    names = {option.name.lower(): option for option in known}
    values = {option.name: option.default for option in known}
    for name, text in given.items():
        option = names.get(name.lower())
        if option is None:
            if name.lower() in ignored:
                continue
            raise _unknown(name, known)
        try:
            values[option.name] = option.parse(text)
        except ValueError as error:
            shown = "" if option.parse is _secret or CREDENTIALS.search(text) else f" {text!r}"
            raise OptionError(f"option {option.name}{shown} {error}") from None
    _check_pairs(values)
    return Options(values)


def named(given: Mapping[str, str], known: tuple[Option, ...]) -> dict[str, str]:
    """Return the options of *given*, whose names may be in any case, that are in *known*."""
    names = {option.name.lower(): option.name for option in known}
    return {names[name.lower()]: text for name, text in given.items() if name.lower() in names}


# Names of options of other sources, and of the source or sink -> names of the options to use instead.
OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "kafka.bootstrap.servers": ("endpoints",),
    "bootstrap.servers": ("endpoints",),
    "nameserver": ("endpoints",),
    "namesrvaddr": ("endpoints",),
    "groupid": ("group",),
    "groupidprefix": ("group",),
    "kafka.group.id": ("group",),
    "consumergroup": ("group",),
    "includeheaders": ("columns",),
    "topic": ("subscribe",),
    "topics": ("subscribe", "topic"),
    "topicspattern": ("subscribePattern",),
    "path": ("subscribe", "topic"),
}


def _unknown(name: str, known: tuple[Option, ...]) -> OptionError:
    """Return the error for the option *name*, which is not one of *known*."""
    ours = next((ours for ours in OTHER_NAMES.get(name.lower(), ()) if ours in {option.name for option in known}), "")
    if ours:
        return OptionError(f"option {name!r} does not exist; here it is {ours!r}")
    for kind, others in (("batches that are read", BATCH), ("streams that are read", STREAM), ("writing", SINK)):
        for option in others:
            if option.name.lower() == name.lower():
                return OptionError(f"option {option.name} is one of {kind}; leave it out")
    by_lower = {option.name.lower(): option.name for option in known}
    near = get_close_matches(name.lower(), by_lower, 1)
    hint = f"did you mean {by_lower[near[0]]!r}?" if near else f"there are {', '.join(sorted(by_lower.values()))}"
    return OptionError(f"option {name!r} does not exist; {hint}")


def _check_pairs(values: Mapping[str, Any]) -> None:
    """Check pairs of options that need or contradict one another.

    Raises:
      OptionError: some do not fit.
    """
    if bool(values["accessKey"]) != bool(values["secretKey"]):
        raise OptionError("options accessKey and secretKey belong together; give both or none")
    if values["tlsKey"] and not values["tlsCert"]:
        raise OptionError("option tlsKey is of no use without the certificate; give tlsCert too")
    if values["tlsInsecure"] and values["tlsCa"]:
        raise OptionError("options tlsInsecure and tlsCa contradict each other; give one of them")
    since_ms, until_ms = values.get("startingTimestamp"), values.get("endingTimestamp")
    if since_ms is not None and until_ms is not None and since_ms > until_ms:
        text = f"option startingTimestamp {since_ms} is after endingTimestamp {until_ms}"
        raise OptionError(f"{text}; no message could be between them")
    _check_transaction(values)
    least, most = values.get("minOffsetsPerTrigger", 0), values.get("maxOffsetsPerTrigger", 0)
    if most and least > most:
        text = f"option minOffsetsPerTrigger {least} is more than maxOffsetsPerTrigger {most}"
        raise OptionError(f"{text}; no micro-batch could have so many messages")


def _check_transaction(values: Mapping[str, Any]) -> None:
    """Check the options that name and number a transaction.

    Raises:
      OptionError: some do not fit.
    """
    name, number = values.get("txnAppId", ""), values.get("txnVersion")
    if bool(name) != (number is not None):
        raise OptionError("options txnAppId and txnVersion belong together; give both or none")
    if name and values["guarantee"] == AT_LEAST_ONCE:
        raise OptionError(f"options txnAppId and guarantee {AT_LEAST_ONCE} contradict each other; give one of them")
