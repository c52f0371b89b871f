"""The inner loop of the key index: the keys of usual messages.

The native kernel has a function with the same name that does the same; see `martlet.runtime.native`.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

from martlet.message import find_property
from martlet.store.keys.active_file import ActiveFile
from martlet.store.keys.key_hashes import KeyHashes
from martlet.store.queues.queues import Queue

__all__ = ["SHORT_BYTES", "Waiting", "index_usual"]

# A message to index: its queue, log position, end, store time and properties.
Waiting: TypeAlias = tuple[Queue, int, int, int, bytes]

# A message with fewer bytes of properties has all of its keys indexed in one go, which takes up to 1 ms.
SHORT_BYTES: Final = 1024


def index_usual(
    waiting: Sequence[Waiting], budget: int, active: ActiveFile, entries_max: int, hashes: KeyHashes
) -> tuple[int, int, int]:
    """Index the keys of the first messages of *waiting*; return how many messages, the unused budget, and the newest
    store time of these messages.

    Stops when about *budget* keys are indexed, or before a message that is not usual: one with long properties, or with
    more keys than fit into the active file, which has *entries_max* entries.
    """
    item, count, newest_ms = active.item, 0, 0
    for queue, position, _, store_ms, properties in waiting:
        if budget <= 0:
            break
        if properties.find(b"KEY") < 0:
            count, budget, newest_ms = count + 1, budget - 1, max(newest_ms, store_ms)
            continue
        spaces = properties.count(b" ")
        if len(properties) > SHORT_BYTES or item is None or item.count + spaces + 2 > entries_max:
            break
        at = properties.find(b"UNIQ_KEY\x01")
        if at >= 0:
            if at and properties[at - 1] != 2:
                unique = find_property(properties, b"UNIQ_KEY")
            else:
                end = properties.find(2, at)
                unique = properties[at + 9 : end] if end >= 0 else properties[at + 9 :]
            if unique:
                active.insert(hashes.of(queue, unique), position, store_ms)
        if properties.find(b"KEYS\x01") >= 0:
            for key in find_property(properties, b"KEYS").split(b" "):
                if key:
                    active.insert(hashes.of(queue, key), position, store_ms)
        count, budget, newest_ms = count + 1, budget - 1 - spaces, max(newest_ms, store_ms)
    return count, budget, newest_ms
