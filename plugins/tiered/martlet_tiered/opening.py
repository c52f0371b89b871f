"""Opens the store of a cold tier, and refuses one that cannot keep two brokers apart."""

from typing import Final

from martlet_tiered.config import TieredConfig
from martlet_tiered.errors import ObjectChanged, ObjectExists, StoreUnusable
from martlet_tiered.local import LocalObjects
from martlet_tiered.location import LOCAL, TierLocation
from martlet_tiered.names import probe_name
from martlet_tiered.objects import Objects
from martlet_tiered.remote import RemoteObjects

__all__ = ["open_objects", "probe"]

TEMPORARY_AGE_MS: Final = 24 * 3_600_000


def open_objects(location: TierLocation, config: TieredConfig, unique: str, now_ms: int) -> Objects:
    """Return the objects at *location* after a `probe`; *unique* is different for each call.

    Raises:
      TierError: the store cannot be used.
    """
    if location.scheme == LOCAL:
        local = LocalObjects(location.prefix)
        local.remove_temporary(now_ms - TEMPORARY_AGE_MS)
        probe(local, unique)
        return local
    objects = RemoteObjects(location, config)
    try:
        probe(objects, unique)
    except StoreUnusable:
        if not config.unsafe_single_writer:
            raise
        objects = RemoteObjects(location, config, unconditional=True)
        objects.list_folder(probe_name(unique))  # unless it was another reason
    return objects


def probe(objects: Objects, unique: str) -> None:
    """Write an object that must not replace another, and compare and swap it; then remove it.

    Raises:
      StoreUnusable: the store does not keep two writers apart.
    """
    name = probe_name(unique)
    try:
        fault = _find_fault(objects, name)
    finally:
        objects.delete(name)
    if fault:
        raise StoreUnusable(
            f"{objects.url!r} {fault}, so it cannot keep two brokers apart; use a store with conditional writes, or "
            "set tiered.unsafe_single_writer = true if no other broker will ever use this prefix"
        )


def _find_fault(objects: Objects, name: str) -> str:
    objects.create(name, b"first")
    try:
        objects.create(name, b"second")
    except ObjectExists:
        pass
    else:
        return "lets a second writer replace an object (If-None-Match)"
    if objects.read(name) != b"first":
        return "refuses to replace an object, and does it nevertheless"
    tag = objects.tag(name)
    return "" if tag is None else _find_fault_in_swaps(objects, name, tag)


def _find_fault_in_swaps(objects: Objects, name: str, tag: str) -> str:
    try:
        objects.swap(name, b"third", tag)
    except ObjectChanged:
        # A lost answer leaves the same; then the object is the new one.
        if objects.read(name) != b"third":
            return "refuses to replace the version that an object has (If-Match)"
    try:
        objects.swap(name, b"fourth", tag)
    except ObjectChanged:
        return "" if objects.read(name) == b"third" else "replaces an old version of an object (If-Match)"
    return "replaces an old version of an object (If-Match)"
