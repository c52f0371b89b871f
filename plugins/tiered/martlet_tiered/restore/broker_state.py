"""The state of a broker as an object of the tier: what a restore needs, and no uploaded record says.

The object ``state/e3-268435456.state`` has the state up to log position 268435456, stored in epoch 3: the files of the
broker's tables, where each queue continues, and where the log has to begin, so that sessions, groups, timers and
transactions can be computed from the internal records that were uploaded. It counts once the table ends at this
position or later; `Reach` says more.

Layout: `HEADER`, little-endian (magic, version, bytes before the compression, CRC-32 of the rest), then MessagePack,
compressed with zstd.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import pyarrow as pa
from msgspec import Struct

from martlet.runtime.checksum import crc32
from martlet_tiered.errors import ObjectDamaged, ObjectMissing
from martlet_tiered.objects import Objects
from martlet_tiered.owners import Reach

__all__ = [
    "STATE_FOLDER",
    "TABLE_PATH",
    "BrokerState",
    "QueuePlace",
    "decode_state",
    "encode_state",
    "find_state",
    "store_state",
]

STATE_FOLDER: Final = "state"
STATE: Final = re.compile(r"e([1-9][0-9]{0,18})-(0|[1-9][0-9]{0,18})\.state")
MAGIC: Final = b"MSTA"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sIQI")
# Far more than tables take; whoever can write to the store may not make a restore exhaust the memory.
STATE_BYTES_MAX: Final = 1 << 30
# The tables of the broker and its plugins.
TABLE_PATH: Final = re.compile(r"config/[A-Za-z0-9][A-Za-z0-9_-]*\.json")
# States that count and are kept, in case the newest one is damaged.
KEPT: Final = 2


class QueuePlace(Struct, array_like=True, frozen=True):
    """Where a queue continues; consumers get no message before `expired_to`."""

    topic: str
    queue: int
    next: int
    expired_to: int


class BrokerState(Struct, frozen=True):
    """The state of `broker` at log position `position`; `queues` may have messages up to `end`, which is not before.

    A log that begins at `log_start` has all records that the state is computed from. `segment_bytes` is the size of its
    files. `files` has the tables of the broker by their paths in the data directory, without secrets.
    """

    broker: str
    position: int
    end: int
    log_start: int
    segment_bytes: int
    time_ms: int
    queues: Sequence[QueuePlace]
    files: Mapping[str, bytes]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(BrokerState)


def encode_state(state: BrokerState) -> bytes:
    """Return the object with *state*."""
    data = _ENCODER.encode(state)
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return HEADER.pack(MAGIC, VERSION, len(data), crc32(packed)) + packed


def decode_state(data: bytes) -> BrokerState:
    """Return the state in *data*.

    Raises:
      ObjectDamaged: it is damaged, of a later version, or has other files than tables.
    """
    if len(data) < HEADER.size:
        raise ObjectDamaged(f"a state of a broker has {len(data)} bytes; {HEADER.size} is the least")
    magic, version, size, crc = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ObjectDamaged(f"a state of a broker begins with {magic!r} {version}; expected {MAGIC!r} {VERSION}")
    packed = memoryview(data)[HEADER.size :]
    if crc32(packed) != crc:
        raise ObjectDamaged("a state of a broker does not match its CRC")
    if size > STATE_BYTES_MAX:
        raise ObjectDamaged(f"a state of a broker has {size} bytes; {STATE_BYTES_MAX} is the limit")
    try:
        state = _DECODER.decode(pa.decompress(packed, size, codec="zstd"))
    except (pa.ArrowException, OSError, ValueError, msgspec.MsgspecError) as error:
        raise ObjectDamaged(f"a state of a broker cannot be decoded: {error}") from error
    for path in state.files:
        if not TABLE_PATH.fullmatch(path):
            raise ObjectDamaged(f"a state of a broker has a file {path!r}, which is no table")
    return state


def store_state(objects: Objects, epoch: int, state: BrokerState, reach: Reach) -> None:
    """Store *state* of *epoch*, and remove others that nobody needs, as *reach* says.

    Raises:
      TierError: the store cannot be used.
    """
    objects.create(f"{STATE_FOLDER}/e{epoch}-{state.end}.state", encode_state(state))
    listed = _listed(objects)
    useless = [name for of, position, name in listed if not reach.may_have(of, position)]
    for name in useless + [name for of, position, name in listed if reach.has(of, position)][KEPT:]:
        objects.delete(name)


def find_state(objects: Objects, reach: Reach) -> tuple[BrokerState | None, list[str]]:
    """Return the newest intact state that counts, as *reach* says, and why newer ones cannot be used.

    Raises:
      TierError: the store cannot be used.
    """
    problems: list[str] = []
    for epoch, position, name in _listed(objects):
        if not reach.has(epoch, position):
            continue
        try:
            return decode_state(objects.read(name)), problems
        except (ObjectDamaged, ObjectMissing) as error:
            problems.append(f"{name}: {error}")
    return None, problems


def _listed(objects: Objects) -> list[tuple[int, int, str]]:
    """Return epoch, position and name of each state, the newest first: the last owner's, whatever their position."""
    found = []
    for each in objects.list_folder(STATE_FOLDER):
        match = STATE.fullmatch(each.name.removeprefix(STATE_FOLDER + "/"))
        if match:
            found.append((int(match[1]), int(match[2]), each.name))
    return sorted(found, reverse=True)
