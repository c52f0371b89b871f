"""The messages of usual sends, as the store takes them.

The native kernel has `usual_items` as well; see `martlet.runtime.native`.
"""

from collections.abc import Callable, Sequence
from typing import Final

from martlet.message import PROPERTIES_BYTES_MAX, Message
from martlet.store.append.items import AppendItem
from martlet.tables.topics import Topic
from martlet_remoting.wire.codes import FLAG_ONEWAY
from martlet_remoting.wire.sends import Send

__all__ = ["contains", "usual_items"]

OTHER_FLAGS: Final = ~FLAG_ONEWAY


def usual_items(
    sends: Sequence[Send],
    run: list[AppendItem | Message] | list[AppendItem],
    room: int,
    staged_flags: int,
    words: Sequence[bytes],
    topic: Topic,
    host: bytes,
    stamp: bytes,
    body_bytes_max: int,
    code_of: Callable[[bytes], int],
) -> int:
    """Add to *run* the items of *sends* from index ``len(run)`` on, up to the first that is not usual; return *room*
    without their bytes.

    Stops before a send to another topic or to a queue that is not open, and before one that is too large, or that has
    bits of *staged_flags* in its sysFlag or one of *words* in its properties; also once *room* is negative.

    Args:
      stamp: the properties that each message gets.
      code_of: returns the tag code of encoded properties (`PublishGrant.code_of`).
    """
    name, open_queues, queues = topic.name, topic.open_queues, topic.queues
    properties_bytes_max = PROPERTIES_BYTES_MAX - len(stamp) - 1
    for send in sends[len(run) :] if run else sends:
        to, queue_id, body, properties, flag, sys_flag, born_ms, _, _, command_flag, _ = send
        if (
            to != name
            or not 0 <= queue_id < open_queues
            or room < 0
            or sys_flag & staged_flags
            or command_flag & OTHER_FLAGS
            or len(body) > body_bytes_max
            or len(properties) > properties_bytes_max
            or (words and contains(properties, words))
        ):
            break
        properties += stamp if properties[-1] == 2 else b"\x02" + stamp
        queue = queues.get(queue_id) or topic.queue(queue_id)
        room -= queue.overhead + len(body) + len(properties)
        run.append((queue, body, properties, code_of(properties), flag, sys_flag, born_ms, host, 0, 0))
    return room


def contains(properties: bytes, words: Sequence[bytes]) -> bool:
    """Return whether *properties* contain one of *words*."""
    # `in` on bytes raises and catches a TypeError internally each time. A generator is slower.
    for word in words:  # noqa: SIM110
        if properties.find(word) >= 0:
            return True
    return False
