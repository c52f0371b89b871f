"""Stores that refuse, hang or are not there: a typed error with a sentence, in time, and without secrets."""

import logging
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from martlet_tiered.delta import TableLog
from martlet_tiered.errors import AccessRefused, StoreHung, StoreUnavailable, StoreUnusable, TierError
from martlet_tiered.failures import explain
from martlet_tiered.names import commit_name
from martlet_tiered.objects import Objects
from martlet_tiered.remote import RemoteObjects
from martlet_tiered.table import ColdTable

from .cold import SCHEMA, Tier, append
from .stores import ENVIRON, Faulty, make_bucket

HASTY = {"connect_timeout_ms": 200, "request_timeout_ms": 200, "upload_timeout_ms": 300, "retries_max": 1}
CALLS: dict[str, Callable[[Objects], object]] = {
    "create": lambda objects: objects.create("one", b"data"),
    "read": lambda objects: objects.read("one"),
    "read_range": lambda objects: objects.read_range("one", 0, 1),
    "size": lambda objects: objects.size("one"),
    "list": lambda objects: objects.list_folder("one"),
    "delete": lambda objects: objects.delete("one"),
    "tag": lambda objects: objects.tag("one"),
    "swap": lambda objects: objects.swap("one", b"data", "tag"),
}
# What S3 answers to wrong credentials: it repeats the key, and what was signed.
REFUSAL = (
    "<Error><Code>{code}</Code><Message>no</Message><AWSAccessKeyId>martlet-key-id</AWSAccessKeyId>"
    "<StringToSign>martlet-secret-key</StringToSign></Error>"
)


def remote(tier: Tier) -> RemoteObjects:
    """The objects without a probe."""
    return RemoteObjects(tier.location(), tier.config())


def unopened(tier: Tier) -> ColdTable:
    objects = remote(tier)
    return ColdTable(objects, TableLog(objects, tier.location(), tier.config()), "a")


@pytest.fixture
def closed_tier() -> Tier:
    """A port where nobody listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    return Tier("s3://lake/a", {**HASTY, "endpoint": f"http://127.0.0.1:{port}"}, ENVIRON)


@pytest.fixture
def hung_tier() -> Iterator[Tier]:
    """A port that accepts connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=100)) as listener:
        yield Tier("s3://lake/a", {**HASTY, "endpoint": f"http://127.0.0.1:{listener.getsockname()[1]}"}, ENVIRON)


@pytest.mark.parametrize("call", CALLS)
def test_an_unreachable_store_is_an_error(closed_tier: Tier, call: str) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached; check tiered"):
        CALLS[call](remote(closed_tier))


@pytest.mark.parametrize("call", CALLS)
def test_a_hung_store_is_an_error(hung_tier: Tier, call: str) -> None:
    with pytest.raises(StoreHung, match="does not answer in time; check the network"):
        CALLS[call](remote(hung_tier))


def test_a_table_of_an_unreachable_or_hung_store_is_an_error(closed_tier: Tier, hung_tier: Tier) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        unopened(closed_tier).open(SCHEMA)
    with pytest.raises(StoreHung, match="does not answer in time"):
        unopened(hung_tier).open(SCHEMA)
    with pytest.raises(StoreHung, match="does not answer in time"):
        unopened(hung_tier)._log.create("martlet:a", SCHEMA)


def test_a_store_that_hangs_later_is_an_error_until_it_answers_again(faulty: Faulty, faulty_tier: Tier) -> None:
    objects = faulty_tier.objects()
    tier = Tier(faulty_tier.url, {**faulty_tier.settings, **HASTY}, ENVIRON)
    table = tier.owned()
    append(table, objects, 0, 5)
    faulty.silent = True
    calls: list[Callable[[], object]] = [
        table.refresh,
        lambda: table.take_over("new"),
        lambda: table.append(5, 9, []),
        lambda: table.garbage(0),
        table.checkpoint,
    ]
    for call in calls:
        with pytest.raises(StoreHung):
            call()
    # Here deltalake does not say that the time was over.
    with pytest.raises(StoreUnavailable, match="gave no complete answer, or not in time"):
        table._log.commit((), {}, {})
    faulty.silent = False
    append(faulty_tier.owned(), objects, 5, 9)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_store_is_an_error_after_all_retries(faulty: Faulty, faulty_tier: Tier, status: int) -> None:
    tier = Tier(faulty_tier.url, {**faulty_tier.settings, **HASTY}, ENVIRON)
    faulty.answer = (status, b"<Error><Code>SlowDown</Code></Error>")
    with pytest.raises(StoreUnavailable, match=f"answers {status} SlowDown; it may be overloaded"):
        remote(tier).read("one")
    with pytest.raises(StoreUnavailable, match=f"answers {status} SlowDown"):
        unopened(tier).open(SCHEMA)


@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch"), (401, "AccessDenied")],
)
@pytest.mark.parametrize("call", CALLS)
def test_refused_credentials_are_an_error_that_shows_none(
    faulty: Faulty, faulty_tier: Tier, caplog: pytest.LogCaptureFixture, status: int, code: str, call: str
) -> None:
    faulty.answer = (status, REFUSAL.format(code=code).encode())
    with caplog.at_level(logging.DEBUG), pytest.raises(AccessRefused) as caught:
        CALLS[call](remote(faulty_tier))
    assert_without_secrets(caught.value, caplog)


def test_a_table_shows_no_credentials_either(
    faulty: Faulty, faulty_tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    table = faulty_tier.owned()
    faulty.answer = (403, REFUSAL.format(code="SignatureDoesNotMatch").encode())
    calls: list[Callable[[], object]] = [
        lambda: unopened(faulty_tier).open(SCHEMA),
        lambda: unopened(faulty_tier)._log.create("martlet:a", SCHEMA),
        table.refresh,
        lambda: table.take_over("new"),
        lambda: table.append(0, 5, []),
        lambda: table._log.commit((), {}, {}),
        table.checkpoint,
    ]
    for call in calls:
        with caplog.at_level(logging.DEBUG), pytest.raises(AccessRefused, match="403 SignatureDoesNotMatch") as caught:
            call()
        assert_without_secrets(caught.value, caplog)
    for shown in (table, table._log, remote(faulty_tier), faulty_tier.location()):
        assert not any(value in repr(shown) for value in ENVIRON.values())


def assert_without_secrets(error: TierError, caplog: pytest.LogCaptureFixture) -> None:
    text = "".join(traceback.format_exception(error)) + repr(error) + caplog.text
    chained = error.__cause__ or error.__context__
    while chained is not None:
        text += repr(chained)
        chained = chained.__cause__ or chained.__context__
    assert "martlet-secret-key" not in text
    assert "martlet-key-id" not in text


def test_a_missing_bucket_is_an_error(s3_tier: Tier) -> None:
    tier = Tier("s3://nolake/a", s3_tier.settings, s3_tier.environ)
    for call in ("create", "read", "list"):
        with pytest.raises(StoreUnusable, match="the bucket does not exist; create it"):
            CALLS[call](remote(tier))
    with pytest.raises(StoreUnusable, match="the bucket does not exist"):
        unopened(tier).open(SCHEMA)


def test_the_root_of_a_bucket_is_a_prefix(s3_url: str) -> None:
    make_bucket(s3_url, "whole")
    tier = Tier("s3://whole", {"endpoint": s3_url}, ENVIRON)
    append(tier.owned(), tier.objects(), 0, 5)
    assert tier.table().end == 5
    assert tier.objects().list_folder("table/_delta_log")[0].name == commit_name(0)


def test_a_directory_that_cannot_be_used_is_an_error(tmp_path: object) -> None:
    with pytest.raises(TierError, match="cannot be used: Not a directory; check the disk"):
        Tier(f"{__file__}/tier").objects()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("something else", StoreUnusable),
        ("error performing token request: no credentials in environment", AccessRefused),
        ("status code: 400 Bad Request: <Code>ExpiredToken</Code>", AccessRefused),
        ("status code: 409 Conflict: <Code>ConditionalRequestConflict</Code>", StoreUnavailable),
        ("status code: 404 Not Found: <Code>ContainerNotFound</Code>", StoreUnusable),
        ("status code\n \x1b[31m\u21b3\x1b[0m 403 Forbidden", AccessRefused),
        ("Server returned non-2xx status code: 418 I'm a teapot", StoreUnusable),
        ("HTTP error: error decoding response body", StoreUnavailable),
    ],
)
def test_each_error_of_a_library_has_one_meaning(text: str, kind: type[TierError]) -> None:
    assert type(explain(Exception(text), "s3://lake")) is kind
