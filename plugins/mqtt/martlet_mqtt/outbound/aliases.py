"""Topic aliases: numbers that stand for topic names on one connection (MQTT 5 section 3.3.2.3.4)."""

from typing import Final, final

from martlet_mqtt.wire.properties import U16, decode_varint, encode_varint

__all__ = ["Aliases"]

# A shorter name takes fewer bytes than an alias saves.
NAME_BYTES_MIN: Final = 8
_ALIAS: Final = b"\x23"


@final
class Aliases:
    """The aliases of the names that are sent to a client, each for the first names that need one."""

    __slots__ = ("_max", "_numbers")

    def __init__(self, alias_max: int) -> None:
        self._max = alias_max
        self._numbers: dict[bytes, int] = {}

    def shorten(self, frame: bytes, more: int = 0) -> bytes:
        """Return the PUBLISH packet *frame* of MQTT 5 with an alias, and without its name if the client knows it.

        *more* bytes of its payload follow it.
        """
        _, at = decode_varint(frame, 1)
        end = at + 2 + (frame[at] << 8 | frame[at + 1])
        name = frame[at + 2 : end]
        if len(name) < NAME_BYTES_MIN:
            return frame
        number = self._numbers.get(name)
        is_known = number is not None
        if number is None:
            if len(self._numbers) >= self._max:
                return frame
            number = self._numbers[name] = len(self._numbers) + 1
        id_end = end + (2 if frame[0] & 6 else 0)
        size, begin = decode_varint(frame, id_end)
        properties = _ALIAS + U16.pack(number) + frame[begin : begin + size]
        sent = b"" if is_known else name
        rest = U16.pack(len(sent)) + sent + frame[end:id_end] + encode_varint(len(properties)) + properties
        rest += frame[begin + size :]
        return frame[:1] + encode_varint(len(rest) + more) + rest
