"""Decodes the binary headers of commands (RocketMQ RocketMQSerializable.java)."""

from struct import Struct
from struct import error as struct_error
from typing import Final

from martlet.errors import RemoteProtocolError
from martlet_remoting.wire.headers import REMARK_MAX

__all__ = ["BINARY_FIXED", "KEY_LENGTH", "decode_binary_header"]

FIELDS_MAX: Final = 1024  # 1 us each; RocketMQ's requests have up to 30
# Code, language, version, opaque, flag, and the length of the remark.
BINARY_FIXED: Final = Struct(">hbhiii")
KEY_LENGTH: Final = Struct(">h")
_LENGTH: Final = Struct(">i")


def decode_binary_header(header: bytes) -> tuple[int, int, int, int, int, str, dict[str, object]]:
    """Return code, language, version, opaque, flag, remark and fields of a binary header.

    Raises:
      RemoteProtocolError: its lengths contradict each other, or it is not UTF-8 or too long.
    """
    try:
        code, language, version, opaque, flag, remark_length = BINARY_FIXED.unpack_from(header)
        remark_end = BINARY_FIXED.size + remark_length
        if remark_length < 0 or remark_end > len(header):
            raise _wrong_length(remark_length, "remark")
        remark = header[BINARY_FIXED.size : remark_end].decode()
        ext_length: int = _LENGTH.unpack_from(header, remark_end)[0]
        ext = _binary_ext(header, remark_end + 4, ext_length)
    except struct_error as error:
        raise RemoteProtocolError(f"binary header of {len(header)} bytes is cut short") from error
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("binary header is not UTF-8") from error
    if remark_length > REMARK_MAX:
        raise RemoteProtocolError(f"remark of {remark_length} bytes is over the limit of {REMARK_MAX}")
    return code, language, version, opaque, flag, remark, ext


def _wrong_length(length: int, what: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"binary header: length {length} of the {what} exceeds the header")


def _binary_ext(header: bytes, position: int, length: int) -> dict[str, object]:
    size = len(header)
    if length < 0 or position + length != size:
        raise RemoteProtocolError(f"binary header: length {length} of the fields does not match the header")
    ext: dict[str, object] = {}
    key_length_at, value_length_at = KEY_LENGTH.unpack_from, _LENGTH.unpack_from
    fields = 0
    while position < size:
        key_length: int = key_length_at(header, position)[0]
        key_end = position + 2 + key_length
        if key_length < 0 or key_end > size:
            raise _wrong_length(key_length, "field name")
        value_length: int = value_length_at(header, key_end)[0]
        value_end = key_end + 4 + value_length
        if value_length < 0 or value_end > size:
            raise _wrong_length(value_length, "field value")
        key = header[position + 2 : key_end].decode()
        if value_length:
            ext[key] = header[key_end + 4 : value_end].decode()
        position = value_end
        fields += 1
        if fields > FIELDS_MAX:
            raise RemoteProtocolError(f"binary header has more than {FIELDS_MAX} fields; no request has so many")
    return ext
