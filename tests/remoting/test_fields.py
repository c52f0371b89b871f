"""The records that hot requests are read into, and what does not fit them."""

import subprocess
import sys

import orjson
import pytest

from martlet.errors import Refused, RemoteProtocolError
from martlet_remoting.wire.codec import decode_frame, encode_binary_command, encode_command
from martlet_remoting.wire.fields import pull_fields, send_fields
from martlet_remoting.wire.headers import decode_pull_header
from martlet_remoting.wire.packets import Command

SEND: dict[str, object] = {
    "a": "g",
    "b": "T",
    "c": "TBW102",
    "d": "4",
    "e": "1",
    "f": "0",
    "g": "17",
    "h": "0",
    "i": "k\x01v\x02",
}
PULL: dict[str, object] = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": "3",
    "queueOffset": "70",
    "maxMsgNums": "32",
    "sysFlag": "2",
}
PULL |= {"commitOffset": "0", "suspendTimeoutMillis": "15000", "subVersion": "5"}


def arrived(code: int, ext: dict[str, object], *, binary: bool = False) -> Command:
    command = Command(code, ext, b"body")
    return decode_frame(encode_binary_command(command) if binary else encode_command(command))


def arrived_raw(code: int, ext: bytes) -> Command:
    header = b'{"code":%d,"extFields":%b,"opaque":7}' % (code, ext)
    return decode_frame((4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header)


@pytest.mark.parametrize("binary", [False, True], ids=["JSON", "ROCKETMQ"])
def test_a_send_is_read_in_either_encoding(binary: bool) -> None:
    fields = send_fields(arrived(310, {**SEND, "j": "2", "m": "true", "n": "broker-a"}, binary=binary))
    assert fields is not None
    assert (fields.b, fields.e, fields.f, fields.g, fields.h) == ("T", 1, 0, 17, 0)
    assert (fields.i, fields.j, fields.m) == ("k\x01v\x02", 2, True)


def test_bare_numbers_and_booleans_are_read() -> None:
    fields = send_fields(arrived_raw(310, orjson.dumps({**SEND, "e": 5, "g": 1, "j": 0, "m": False})))
    assert fields is not None
    assert (fields.e, fields.g, fields.j, fields.m) == (5, 1, 0, False)


ODD = [{"b": 7}, {"e": ""}, {"e": "x"}, {"e": str(1 << 31)}, {"g": str(1 << 63)}, {"i": None}, {"m": "perhaps"}]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd))
def test_what_does_not_fit_is_none_and_can_still_be_read_by_name(odd: dict[str, object]) -> None:
    ext = {**SEND, **odd}
    command = arrived_raw(310, orjson.dumps(ext))
    assert send_fields(command) is None
    assert command.ext == ext


@pytest.mark.parametrize("missing", ["b", "e", "i"])
def test_a_send_without_what_it_needs_does_not_fit(missing: str) -> None:
    assert send_fields(arrived(310, {name: value for name, value in SEND.items() if name != missing})) is None


@pytest.mark.parametrize("binary", [False, True], ids=["JSON", "ROCKETMQ"])
def test_a_pull_is_read_in_either_encoding(binary: bool) -> None:
    header = decode_pull_header(arrived(11, {**PULL, "subscription": "a || b"}, binary=binary))
    assert (header.group, header.topic, header.queue_id, header.offset, header.messages_max) == ("g", "T", 3, 70, 32)
    assert (header.sys_flag, header.suspend_ms, header.sub_version) == (2, 15000, 5)
    assert (header.expression, header.expression_type, header.bytes_max) == ("a || b", "TAG", -1)


def test_a_pull_with_empty_fields_is_read_by_name() -> None:
    """As clients in other languages send it."""
    odd = {**PULL, "commitOffset": "", "expressionType": "", "maxMsgBytes": ""}
    command = arrived(11, odd)
    assert pull_fields(command) is None
    header = decode_pull_header(command)
    assert (header.commit_offset, header.expression_type, header.bytes_max) == (0, "TAG", -1)


def test_a_pull_without_its_offset_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="queueOffset"):
        decode_pull_header(arrived(11, {name: value for name, value in PULL.items() if name != "queueOffset"}))


HOSTILE = [b"[]", b"7", b'"x"', b'{"b":"\xff"}']


@pytest.mark.parametrize("code", [11, 310])
@pytest.mark.parametrize("ext", HOSTILE, ids=repr)
def test_fields_that_are_none_fit_nothing_and_say_so_when_they_are_asked_for(code: int, ext: bytes) -> None:
    command = arrived_raw(code, ext)
    assert (send_fields if code == 310 else pull_fields)(command) is None
    with pytest.raises(RemoteProtocolError, match="extFields is not"):
        assert command.ext


@pytest.mark.parametrize("ext", [b"null", b"{}"])
def test_a_command_may_have_no_fields(ext: bytes) -> None:
    assert arrived_raw(310, ext).ext == {}
    assert decode_frame(b'\x00\x00\x00\x0e\x00\x00\x00\x0a{"code":1}').ext == {}


def test_who_only_reads_answers_needs_none_of_these_records() -> None:
    """msgspec would be a third of what a program without an event loop imports for routes and messages."""
    modules = "martlet_remoting.wire.routes, martlet_remoting.wire.answers.messages, martlet.records.layout"
    text = f"import sys, {modules}; print({{'msgspec', 'trio', 'pluggy'}} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", text], text=True) == "set()\n"
