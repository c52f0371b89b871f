"""Large messages: each subscriber has a frame of its own without the payload, and all share that.

A copy of the whole frame for each subscriber would take the memory of a payload for each that does not read.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from martlet.contracts import Buffer
from martlet.delivery.fanout import parts
from martlet.delivery.runs import Frames
from martlet_mqtt.mapping.messages import Arrived, to_deliver

__all__ = ["LARGE_BYTES", "arrived_in", "payloads_of", "with_payloads"]

# Payloads from here on are shared. One copy of a shorter one takes less time than to send frames and payloads apart:
# measured with 1 to 64 KiB, both take the same at 32 to 64 KiB.
LARGE_BYTES: Final = 1 << 15


def arrived_in(records: Buffer) -> Sequence[Arrived | None]:
    """Return the message in each of *records*, as `to_deliver` does; a large payload is ``large``."""
    found: list[Arrived | None] = []
    for _queue_id, _offset, sys_flag, body, properties in parts(records):
        arrived = to_deliver(sys_flag, body, properties)
        if arrived is not None and len(arrived.payload) >= LARGE_BYTES:
            arrived.large, arrived.payload = arrived.payload, b""
        found.append(arrived)
    return found


def payloads_of(frames: Frames, first: int, last: int) -> Sequence[tuple[int, bytes]]:
    """Return the payloads of the messages from index *first* up to *last*, as `with_payloads` wants them."""
    if frames.payloads is None:
        return ()
    begin = frames.ends[first - 1] if first else 0
    return [(frames.ends[index] - begin, each) for index, each in frames.payloads.items() if first <= index < last]


def with_payloads(data: Buffer, payloads: Iterable[tuple[int, bytes]]) -> list[Buffer]:
    """Return *data* in pieces, with each of *payloads* where it belongs: after so many bytes of *data*."""
    pieces: list[Buffer] = []
    at = 0
    for end, payload in payloads:
        pieces += (data[at:end], payload)
        at = end
    if at < len(data):
        pieces.append(data[at:])
    return pieces
