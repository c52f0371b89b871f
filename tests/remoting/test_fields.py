"""The records that hot requests are read into, and what does not fit them."""

import subprocess
import sys

import orjson
import pytest

from martlet.errors import Refused, RemoteProtocolError
from martlet_remoting.wire.codec import decode_frame, encode_binary_command, encode_command
from martlet_remoting.wire.headers import decode_pull_header, decode_send_header
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
    header = decode_send_header(arrived(310, {**SEND, "j": "2", "m": "true", "n": "broker-a"}, binary=binary))
    assert (header.topic, header.queue_id, header.sys_flag, header.born_ms, header.flag) == ("T", 1, 0, 17, 0)
    assert (header.properties, header.reconsume_times, header.batch) == ("k\x01v\x02", 2, True)
    assert header.broker_name == "broker-a"


def test_bare_numbers_and_booleans_are_read() -> None:
    header = decode_send_header(arrived_raw(310, orjson.dumps({**SEND, "e": 5, "g": 1, "j": 0, "m": False})))
    assert (header.queue_id, header.born_ms, header.reconsume_times, header.batch) == (5, 1, 0, False)


ODD = [
    ({"b": 7}, "topic", "7"),
    ({"f": ""}, "sys_flag", 0),
    ({"i": None}, "properties", ""),
    ({"h": str(1 << 31)}, "flag", 1 << 31),
    ({"m": "perhaps"}, "batch", False),
]


@pytest.mark.parametrize(("odd", "name", "value"), ODD, ids=lambda odd: str(odd))
def test_fields_that_do_not_fit_are_read_one_by_one(odd: dict[str, object], name: str, value: object) -> None:
    header = decode_send_header(arrived_raw(310, orjson.dumps({**SEND, **odd})))
    assert getattr(header, name) == value
    assert (header.producer_group, header.queue_id) == ("g", 1)


@pytest.mark.parametrize("odd", [{"e": ""}, {"e": "x"}, {"e": None}, {"g": str(1 << 63)}], ids=str)
def test_a_send_is_refused_for_a_field_that_it_needs(odd: dict[str, object]) -> None:
    with pytest.raises(Refused, match=r"header field [eg]"):
        decode_send_header(arrived_raw(310, orjson.dumps({**SEND, **odd})))


@pytest.mark.parametrize("binary", [False, True], ids=["JSON", "ROCKETMQ"])
def test_a_pull_is_read_in_either_encoding(binary: bool) -> None:
    header = decode_pull_header(arrived(11, {**PULL, "subscription": "a || b"}, binary=binary))
    assert (header.group, header.topic, header.queue_id, header.offset, header.messages_max) == ("g", "T", 3, 70, 32)
    assert (header.sys_flag, header.suspend_ms, header.sub_version) == (2, 15000, 5)
    assert (header.expression, header.expression_type, header.bytes_max) == ("a || b", "TAG", -1)


def test_a_pull_with_empty_fields_is_read_by_name() -> None:
    """As clients in other languages send it."""
    odd = {**PULL, "commitOffset": "", "expressionType": "", "maxMsgBytes": ""}
    header = decode_pull_header(arrived(11, odd))
    assert (header.commit_offset, header.expression_type, header.bytes_max) == (0, "TAG", -1)


def test_a_pull_without_its_offset_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="queueOffset"):
        decode_pull_header(arrived(11, {name: value for name, value in PULL.items() if name != "queueOffset"}))


HOSTILE = [b"[]", b"7", b'"x"', b'{"b":"\xff"}']


@pytest.mark.parametrize("code", [11, 310])
@pytest.mark.parametrize("ext", HOSTILE, ids=repr)
def test_fields_that_are_no_object_are_refused(code: int, ext: bytes) -> None:
    command = arrived_raw(code, ext)
    with pytest.raises(RemoteProtocolError, match="extFields is not"):
        (decode_send_header if code == 310 else decode_pull_header)(command)
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
