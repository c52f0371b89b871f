"""Options: their values, and errors that say what to write instead."""

from pathlib import Path

import pytest

from martlet_spark.errors import OptionError
from martlet_spark.options import BATCH, STREAM, parse

HERE = {"endpoints": "127.0.0.1:9876"}


def test_names_are_found_in_any_case() -> None:
    found = parse({"ENDPOINTS": "a:1;b:2", "maxoffsetspertrigger": "7", "maxBytesPerTrigger": "2m"}, STREAM)
    assert found["endpoints"] == ("a:1", "b:2")
    assert (found["maxOffsetsPerTrigger"], found["maxBytesPerTrigger"], found["pollMs"]) == (7, 2 << 20, 500)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "option endpoints is missing"),
        ({"endpoints": "localhost"}, "has the address 'localhost'; write HOST:PORT"),
        ({"endpoints": "a:99999"}, "has the address 'a:99999'"),
        ({"endpoints": ","}, "is empty"),
        ({"subscibe": "T"}, "option 'subscibe' does not exist; did you mean 'subscribe'?"),
        ({"header": "x"}, "option 'header' does not exist; there are accessKey, assign, "),
        ({"kafka.bootstrap.servers": "x"}, "option 'kafka.bootstrap.servers' does not exist; here it is 'endpoints'"),
        ({"topic": "T"}, "option 'topic' does not exist; here it is 'subscribe'"),
        ({"path": "T"}, "option 'path' does not exist; here it is 'subscribe'"),
        ({"batchBytes": "1m"}, "option batchBytes is one of writing; leave it out"),
        ({"subscribePattern": "("}, r"is not a regular expression"),
        ({"assign": "T"}, "is not JSON"),
        ({"assign": '{"T": []}'}, "names no queue of 'T'; name some, or use the option subscribe"),
        ({"assign": '{"T": [-1]}'}, "names the queue -1 of 'T'"),
        ({"assign": '{"T": ["x"]}'}, "names the queue 'x' of 'T'; write its number"),
        ({"columns": "topic,bdy"}, "column 'bdy' does not exist; did you mean 'body'?"),
        ({"columns": "topic,topic"}, "column 'topic' is selected twice"),
        ({"startingOffsets": "newest"}, "is neither earliest nor latest nor JSON"),
        ({"startingOffsets": '{"T": {"0": "x"}}'}, "has no number for queue 0 of 'T'"),
        ({"startingOffsets": '{"T": 5}'}, "is not JSON such as"),
        ({"startingOffsets": '{"T": {"x": 5}}'}, "names the queue 'x'"),
        (
            {"startingTimestamp": "yesterday"},
            "is not a time; write 2026-03-01T12:00 (local time), 2026-03-01T12:00+01:00, -2h (two hours ago) or 17",
        ),
        ({"startingTimestamp": "15m"}, "option startingTimestamp '15m' is not a time; write"),
        ({"endingTimestamp": "-1"}, "option endingTimestamp '-1' is not a time; write"),
        ({"startingTimestamp": "9", "endingTimestamp": "8"}, "option startingTimestamp 9 is after endingTimestamp 8"),
        ({"startingOffsetsByTimestamp": '{"T": {"0": -1}}'}, "has the time -1 for queue 0 of 'T'; write milliseconds"),
        ({"endingOffsetsByTimestamp": '{"T": {"0": -2}}'}, "has the time -2 for queue 0 of 'T'; write milliseconds"),
        ({"startingOffsetsByTimestampStrategy": "earliest"}, "is none of error, latest"),
        ({"timeoutMs": "1d"}, "is not a time such as"),
        ({"fetchBytes": "0"}, "option fetchBytes '0' is less than 1"),
        ({"fetchBytes": "1.5m"}, "is not a size such as"),
        ({"endingOffsets": "earliest"}, "is neither latest nor JSON"),
        ({"failOnDataLoss": "yes"}, "is neither true nor false"),
        ({"maxRecordsPerPartition": "0"}, "is not between 1 and"),
        ({"minPartitions": "many"}, "is not a whole number"),
        ({"targetPartitionBytes": "64q"}, "is not a size such as"),
        ({"accessKey": "a"}, "accessKey and secretKey belong together"),
        ({"maxOffsetsPerTrigger": "5"}, "option maxOffsetsPerTrigger is one of streams that are read; leave it out"),
        ({"tlsKey": "key.pem"}, "option tlsKey is of no use without the certificate; give tlsCert too"),
        ({"tlsInsecure": "true", "tlsCa": "ca.pem"}, "options tlsInsecure and tlsCa contradict each other"),
    ],
)
def test_a_bad_option_is_named(given: dict[str, str], text: str) -> None:
    base = {} if not given or "endpoints" in given else HERE
    with pytest.raises(OptionError) as caught:
        parse({**base, **given}, BATCH)
    assert text in str(caught.value)


def test_options_of_streams_are_checked() -> None:
    with pytest.raises(OptionError, match="option endingOffsets is one of batches that are read; leave it out"):
        parse({**HERE, "endingOffsets": "latest"}, STREAM)
    with pytest.raises(OptionError, match="option minOffsetsPerTrigger 9 is more than maxOffsetsPerTrigger 8"):
        parse({**HERE, "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, STREAM)


def test_a_secret_is_given_by_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    (tmp_path / "secret").write_text("from-file\n")
    for reference, secret in (("env:SECRET", "s3cret"), (f"file:{tmp_path}/secret", "from-file")):
        found = parse({**HERE, "accessKey": "me", "secretKey": reference}, BATCH).security.signing_key
        assert found is not None
        assert found.secret == secret
        assert secret not in repr(found)


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("s3cret", "is no reference; write env:NAME or file:PATH"),
        ("env:NOBODY_SET_THIS", "refers to the environment variable NOBODY_SET_THIS, which is not set"),
        ("file:/nowhere/secret", "refers to the file /nowhere/secret, which cannot be read: No such file"),
    ],
)
def test_a_secret_itself_is_never_shown(reference: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse({**HERE, "accessKey": "me", "secretKey": reference}, BATCH)
    assert text in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("option", ["tls", "tlsCa", "tlsCert", "tlsInsecure"])
def test_options_of_tls_switch_it_on(option: str) -> None:
    assert parse({**HERE, option: "true"}, BATCH).security.tls
    assert not parse(HERE, BATCH).security.tls


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1700000000000", 1_700_000_000_000),
        ("2023-11-14T22:13:20+00:00", 1_700_000_000_000),
        ("2023-11-14T23:13:20.500+01:00", 1_700_000_000_500),
        ("2023-11-14 22:13:20Z", 1_700_000_000_000),
        ("-2h", 1_700_000_000_000 - 7_200_000),
        ("- 30 min", 1_700_000_000_000 - 1_800_000),
        ("-7D", 1_700_000_000_000 - 7 * 86_400_000),
        ("-90000d", 0),
        ("0001-01-01T00:00+00:00", 0),
    ],
)
def test_a_time_is_a_text_a_number_or_how_long_ago(monkeypatch: pytest.MonkeyPatch, text: str, ms: int) -> None:
    monkeypatch.setattr("martlet_spark.options.time.time_ns", lambda: 1_700_000_000_000_000_000)
    options = {"endpoints": "127.0.0.1:9876", "subscribe": "T", "startingTimestamp": text, "endingTimestamp": text}
    found = parse(options, BATCH)
    assert (found["startingTimestamp"], found["endingTimestamp"]) == (ms, ms)
