"""Makes the object with the keys of a data file again, from the rows of the file."""

import numpy as np

from martlet_columns.records import Integers
from martlet_tiered.errors import ObjectDamaged, ObjectExists, ObjectMissing
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import decode_group, footer_of, read_metadata
from martlet_tiered.format.keys import decode_keys, encode_keys, key_hashes, keys_name
from martlet_tiered.names import DATA_FOLDER
from martlet_tiered.objects import Objects

__all__ = ["rebuild_keys"]


def rebuild_keys(objects: Objects, file: DataFile, *, if_intact: bool = False) -> bool:
    """Store the keys of *file* again if they are missing or damaged; return whether that was done.

    With *if_intact*, compare also keys that can be read with the file, and replace them if they differ. A broker may be
    using both: while the keys are missing, it finds no message of this file by its keys. Files of other programs have
    no keys.

    Raises:
      ObjectDamaged, ObjectMissing: the file is damaged or lost.
      TierError: the store cannot be used.
    """
    name = keys_name(file.path)
    stored = _stored(objects, name)
    if stored is not None and not if_intact:
        return False
    data = _made_again(objects, file)
    if data is None or data == stored:
        return False
    objects.delete(name)
    try:
        objects.create(name, data)
    except ObjectExists:  # another one has just made them; its rows are the same
        return False
    return True


def _stored(objects: Objects, name: str) -> bytes | None:
    """Return the object *name* if it has intact keys."""
    try:
        data = objects.read(name)
        decode_keys(data)
    except (ObjectMissing, ObjectDamaged):
        return None
    return data


def _made_again(objects: Objects, file: DataFile) -> bytes | None:
    name = f"{DATA_FOLDER}/{file.path}"
    metadata = read_metadata(objects, name, file.bytes)
    footer = footer_of(metadata)
    if footer is None:
        return None
    hashes: list[Integers] = []
    for number, group in enumerate(footer.groups):
        rows = decode_group(metadata, number, group.begin, objects.read_range(name, group.begin, group.end))
        hashes.append(np.unique(key_hashes(rows)))
    return encode_keys(hashes)
