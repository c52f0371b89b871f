"""The keys in a file: an object beside it, with the hash of each key and the row group that has it.

Parquet has bloom filters, but pyarrow does not use them, and a look-up would read one for each row group. The hashes
are those of the log's own index (`martlet.store.keys.key_hashes`), so a look-up hashes its key once. All of it can be
made again from the columns `topic`, `key`, `msg_id`, `_properties` and `_record` of the file (`key_hashes`).

Layout, little-endian: `HEADER` (magic, version, entries, CRC-32 of the rest), then, compressed with zstd, the
differences of ascending hashes (u32), and the row groups (u32), each as four planes of bytes, the lowest first. Hashes
with one row group occur once.
"""

import struct
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from martlet.message import find_property
from martlet.records.codec import hash_code, key_hash
from martlet.records.layout import RecordView
from martlet.runtime.checksum import crc32
from martlet_columns.records import Integers
from martlet_tiered.errors import ObjectDamaged

__all__ = ["INDEX_FOLDER", "FileKeys", "decode_keys", "encode_keys", "file_of_keys", "key_hashes", "keys_name"]

INDEX_FOLDER: Final = "index"
SUFFIX: Final = ".keys"
MAGIC: Final = b"MKEY"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sIII")
ENTRY_BYTES: Final = 8
SIGN: Final = 0x80000000
# Longer keys are hashed one by one.
VECTOR_BYTES_MAX: Final = 255
POWERS: Final = np.array([pow(31, exponent, 1 << 32) for exponent in range(VECTOR_BYTES_MAX + 1)], np.uint32)


def keys_name(path: str) -> str:
    """Return the name of the object with the keys of the data file at *path*, which is relative to the table."""
    return f"{INDEX_FOLDER}/{path}{SUFFIX}"


def file_of_keys(name: str) -> str:
    """Return the path of the data file whose keys are in the object *name*."""
    return name.removeprefix(INDEX_FOLDER + "/").removesuffix(SUFFIX)


@final
class FileKeys:
    """The keys of one file: ascending hashes, and for each the number of a row group."""

    __slots__ = ("_groups", "_hashes")

    def __init__(self, hashes: Integers, groups: Integers) -> None:
        self._hashes = hashes
        self._groups = groups

    def __len__(self) -> int:
        return len(self._hashes)

    def groups_of(self, code: int) -> list[int]:
        """Return the numbers of the row groups that may have a key with the hash *code*, ascending."""
        first, end = np.searchsorted(self._hashes, np.array([code, code + 1], np.uint64))
        found: list[int] = self._groups[first:end].tolist()
        return found


def encode_keys(groups: list[Integers]) -> bytes:
    """Return the object for row groups with these hashes, from row group 0 on; hashes may repeat."""
    unique = [_unique(hashes) for hashes in groups]
    hashes = np.concatenate([np.empty(0, np.uint32), *unique]).astype(np.uint32)
    numbers = np.repeat(np.arange(len(unique), dtype=np.uint32), [len(each) for each in unique])
    order = np.argsort(hashes, kind="stable")
    steps = np.diff(hashes[order], prepend=np.uint32(0)).astype("<u4")
    planes = b"".join(each.view(np.uint8).reshape(-1, 4).T.tobytes() for each in (steps, numbers[order].astype("<u4")))
    packed = pa.compress(planes, codec="zstd", asbytes=True)
    return b"".join((HEADER.pack(MAGIC, VERSION, len(hashes), crc32(packed)), packed))


def _unique(hashes: Integers) -> Integers:
    """Return *hashes*, ascending and each once: as `np.unique`, which builds a hash table first."""
    found = np.sort(hashes)
    is_first = np.ones(len(found), bool)
    np.not_equal(found[1:], found[:-1], out=is_first[1:])
    return found[is_first]


def decode_keys(data: bytes) -> FileKeys:
    """Return the keys in *data*, an object that `encode_keys` made.

    Raises:
      ObjectDamaged: it is damaged, or of a later version.
    """
    if len(data) < HEADER.size:
        raise ObjectDamaged(f"an index of keys has {len(data)} bytes; {HEADER.size} is the least")
    magic, version, count, crc = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ObjectDamaged(f"an index of keys begins with {magic!r} {version}; expected {MAGIC!r} {VERSION}")
    packed = memoryview(data)[HEADER.size :]
    if crc32(packed) != crc:
        raise ObjectDamaged("an index of keys does not match its CRC")
    try:
        planes = np.frombuffer(pa.decompress(packed, count * ENTRY_BYTES, codec="zstd"), np.uint8)
    except (pa.ArrowException, OSError) as error:
        raise ObjectDamaged(f"an index of keys cannot be decompressed: {error}") from error
    steps, numbers = (
        np.ascontiguousarray(half.reshape(4, count).T).view("<u4")[:, 0] if count else np.empty(0, np.uint32)
        for half in (planes[: 4 * count], planes[4 * count :])
    )
    return FileKeys(np.cumsum(steps, dtype=np.uint64), numbers)


def key_hashes(rows: Any) -> Integers:
    """Return the hashes of the keys of *rows*, a batch or table of an exact table; some may repeat.

    A message without a unique key has its message id instead.
    """
    batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
    return np.concatenate([np.empty(0, np.uint32), *[_hashes_of(batch) for batch in batches if len(batch)]])


def _hashes_of(batch: pa.RecordBatch) -> Integers:
    topics = batch.column("topic").dictionary_encode()
    codes = np.array([hash_code(topic.encode() + b"#") for topic in topics.dictionary.to_pylist()], np.uint32)
    topic_codes = codes[np.asarray(topics.indices)]
    words = pc.split_pattern(batch.column("key"), " ")
    rows = np.asarray(pc.list_parent_indices(words))
    keys = pa.concat_arrays([words.flatten(), batch.column("msg_id")])
    owners = np.concatenate((rows, np.arange(len(batch))))
    return np.concatenate((_hashed(batch, keys, owners, topic_codes), _raw_hashes(batch)))


def _hashed(batch: pa.RecordBatch, keys: Any, owners: Integers, topic_codes: Integers) -> Integers:
    """Return the hashes of *keys*, which belong to the rows *owners*; empty keys have none."""
    bounds = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + len(keys) + 1]
    data = np.frombuffer(keys.buffers()[2] or b"", np.uint8)
    sizes = np.diff(bounds)
    hashes, is_slow = np.zeros(len(keys), np.uint32), sizes > VECTOR_BYTES_MAX
    for size in np.unique(sizes[(sizes > 0) & ~is_slow]).tolist():
        at = np.flatnonzero(sizes == size)
        first, count = int(at[0]), len(at)
        if at[-1] - first + 1 == count:  # neighbours, as message ids are
            letters = data[bounds[first] : bounds[first + count]].reshape(count, size)
        else:
            letters = data[bounds[at][:, None] + np.arange(size)]
        is_slow[at[(letters >= 0x80).any(axis=1)]] = True
        codes = (letters * POWERS[size - 1 :: -1][:size]).sum(axis=1, dtype=np.uint32)
        hashes[at] = codes + topic_codes[owners[at]] * POWERS[size]
    hashes = np.where(hashes & SIGN, (-hashes.astype(np.int64)).astype(np.uint32), hashes)
    hashes[hashes == SIGN] = 0
    for number in np.flatnonzero(is_slow).tolist():
        topic = batch.column("topic")[int(owners[number])].as_py()
        hashes[number] = key_hash(topic, keys[number].as_py().encode())
    return hashes[sizes > 0]


def _raw_hashes(batch: pa.RecordBatch) -> Integers:
    """Return the hashes of keys in properties that are kept raw; their columns may show other keys."""
    found: list[int] = []
    for name in ("_properties", "_record"):
        column = batch.column(name)
        for row in np.flatnonzero(np.asarray(column.is_valid())).tolist():
            raw = column[row].as_py()
            texts = raw if name == "_properties" else RecordView(raw).properties
            keys = [*find_property(texts, b"KEYS").split(b" "), find_property(texts, b"UNIQ_KEY")]
            topic = batch.column("topic")[row].as_py()
            found += [key_hash(topic, key) for key in keys if key]
    return np.array(found, np.uint32)
