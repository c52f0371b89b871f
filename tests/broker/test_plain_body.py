"""The body of a record as its producer wrote it, for plugins."""

import pytest

from martlet.access.authentication import Authentication
from martlet.contracts import Challenge, Identity
from martlet.message import Message
from martlet.records.codec import decode_record, encode_record
from martlet.records.compression import CompressionError, compress, plain_body
from martlet.records.layout import RecordView
from martlet.testing.stores import HOST

BODY = b"text " * 1000


def stored(body: bytes, sys_flag: int = 0) -> bytes:
    return encode_record(Message("t", body, sys_flag=sys_flag, born_host=HOST), 0, 0, 0, 0, HOST)


def test_it_is_the_same_for_records_and_views_compressed_or_not() -> None:
    packed, flag = compress(BODY)
    for data in (stored(BODY), stored(packed, flag)):
        assert plain_body(decode_record(data)) == BODY
        assert plain_body(RecordView(memoryview(data))) == BODY


def test_a_body_that_is_not_what_it_says_or_too_large_is_an_error() -> None:
    packed, flag = compress(BODY)
    with pytest.raises(CompressionError, match="damaged"):
        plain_body(RecordView(stored(BODY, flag)))
    with pytest.raises(CompressionError, match="more than the limit of 100 bytes"):
        plain_body(RecordView(stored(packed, flag)), 100)


def test_authentication_is_required_once_a_plugin_checks_credentials() -> None:
    passwords, exchanges = Authentication(b"key"), Authentication(b"key")
    passwords.authenticators = (lambda credentials, origin: Identity("somebody"),)
    exchanges.mechanisms = {"X": lambda: lambda data: Challenge(b"")}
    assert [each.required for each in (Authentication(b"key"), passwords, exchanges)] == [False, True, True]
