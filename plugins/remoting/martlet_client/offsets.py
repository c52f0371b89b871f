"""Offsets of a group: where it begins, and what it has committed, to brokers or to a broadcasting consumer's file."""

import logging
from collections.abc import Mapping
from enum import Enum, unique
from functools import partial
from pathlib import Path
from typing import Final, Protocol, final

from martlet.store.disk.files import Disk, RealDisk
from martlet_client.arguments import check_time_ms, check_type
from martlet_client.network import Network
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import BadAnswer, BrokerError
from martlet_remoting.wire.answers.messages import RETRY_PREFIX
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import MessageQueue

__all__ = [
    "BrokerOffsets",
    "ConsumeFrom",
    "LocalOffsets",
    "Offsets",
    "StartingOffsets",
    "max_offset",
    "min_offset",
    "search_offset",
]

log = logging.getLogger(__name__)

FILE_NAME: Final = "offsets.json"
HALF_HOUR_MS: Final = 30 * 60 * 1000


class Offsets(Protocol):
    """Where a group's offsets are kept."""

    async def read(self, queue: MessageQueue) -> int | None: ...
    async def write(self, queue: MessageQueue, offset: int) -> None: ...
    async def flush(self) -> None: ...


@final
@unique
class ConsumeFrom(Enum):
    """Where a group begins in a queue in which it has committed no offset; RocketMQ's rules.

    ``FIRST``: with the oldest message. ``LAST``: with messages stored from now on. ``TIMESTAMP``: with messages
    stored at ``consume_from_ms`` or later.

    The broker overrules ``LAST`` and ``TIMESTAMP`` for a *young* queue, one that still has its first message in
    memory: the group begins with that message. So a group never misses the first messages of a new topic, and a
    new group also gets everything in a small existing topic (docs/client.md says how small). To be sure to skip
    old messages, call `Admin.create_group` and `Admin.reset_offsets` before the first member starts.
    """

    LAST = "CONSUME_FROM_LAST_OFFSET"
    FIRST = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


async def _ask_offset(network: Network, code: int, queue: MessageQueue, ext: Mapping[str, object]) -> int:
    address = await network.broker_address(queue.topic, queue.broker_name)
    where = {"topic": queue.topic, "queueId": queue.queue_id, "bname": queue.broker_name}
    answer = await network.ask(address, code, {**where, **ext})
    return bodies.header_integer(answer, "offset")


async def max_offset(network: Network, queue: MessageQueue) -> int:
    """Return the offset that the queue's next message will get."""
    return await _ask_offset(network, RequestCode.GET_MAX_OFFSET, queue, {})


async def min_offset(network: Network, queue: MessageQueue) -> int:
    """Return the offset of the oldest message in the queue."""
    return await _ask_offset(network, RequestCode.GET_MIN_OFFSET, queue, {})


async def search_offset(network: Network, queue: MessageQueue, timestamp_ms: int) -> int:
    """Return the first offset stored at *timestamp_ms* or later; the maximum if there is none."""
    ext = {"timestamp": timestamp_ms, "boundaryType": "LOWER"}
    return await _ask_offset(network, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queue, ext)


@final
class BrokerOffsets:
    """Offsets of a clustering group, kept by the brokers."""

    def __init__(self, network: Network, group: str) -> None:
        self.network = network
        self.group = group

    async def read(self, queue: MessageQueue) -> int | None:
        """Return the committed offset, None when there is none yet."""
        try:
            return await _ask_offset(
                self.network, RequestCode.QUERY_CONSUMER_OFFSET, queue, {"consumerGroup": self.group}
            )
        except BrokerError as error:
            if error.code == ResponseCode.QUERY_NOT_FOUND:
                return None
            raise

    async def write(self, queue: MessageQueue, offset: int) -> None:
        """Commit *offset*, and return once the broker has stored it."""
        address = await self.network.broker_address(queue.topic, queue.broker_name)
        await self.network.ask(address, RequestCode.UPDATE_CONSUMER_OFFSET, self._ext(queue, offset))

    async def flush(self) -> None:
        """Do nothing: brokers persist offsets themselves."""

    def _ext(self, queue: MessageQueue, offset: int) -> dict[str, object]:
        return {
            "consumerGroup": self.group,
            "topic": queue.topic,
            "queueId": queue.queue_id,
            "commitOffset": offset,
            "bname": queue.broker_name,
        }


@final
class LocalOffsets:
    """Offsets of one broadcasting consumer: in memory, and in *folder*/offsets.json when a folder is given.

    The file is RocketMQ's: ``{"offsetTable":{{queue}:offset}}``.
    """

    def __init__(self, folder: Path | None, disk: Disk | None = None) -> None:
        self.folder = folder
        self._disk = disk or RealDisk()
        self._table: dict[MessageQueue, int] = {}
        self._is_changed = False
        if folder is not None and FILE_NAME in self._disk.names(str(folder)):
            self._table = _read_table(self._content(str(folder / FILE_NAME)))

    def _content(self, path: str) -> bytes:
        fd = self._disk.open(path, read_only=True)
        try:
            return self._disk.read(fd, self._disk.size(fd), 0)
        finally:
            self._disk.close(fd)

    async def read(self, queue: MessageQueue) -> int | None:
        """Return the offset that this consumer reached, None if it never consumed the queue."""
        return self._table.get(queue)

    async def write(self, queue: MessageQueue, offset: int) -> None:
        """Remember *offset*; `flush` writes it to the file."""
        self._is_changed = self._is_changed or self._table.get(queue) != offset
        self._table[queue] = offset

    async def flush(self) -> None:
        """Replace the whole file, so that a crash leaves either the old or the new one; failures are logged."""
        if self.folder is None or not self._is_changed:
            return
        self._is_changed = False
        data = bodies.dump({"offsetTable": self._table})
        try:
            await self._disk.off_loop(partial(self._replace, str(self.folder), data))
        except OSError as error:
            self._is_changed = True
            log.warning("offsets were not written to %s: %s", self.folder, error)

    def _replace(self, folder: str, data: bytes) -> None:
        disk, new = self._disk, f"{folder}/{FILE_NAME}.tmp"
        disk.make_directory(folder)
        if f"{FILE_NAME}.tmp" in disk.names(folder):
            disk.unlink(new)
        fd = disk.open(new, create=True)
        try:
            disk.write(fd, data, 0)
            disk.sync(fd)
        finally:
            disk.close(fd)
        disk.rename(new, f"{folder}/{FILE_NAME}")
        disk.sync_directory(folder)


def _read_table(data: bytes) -> dict[MessageQueue, int]:
    table = bodies.queue_map(bodies.load_object(data).get("offsetTable"))
    for queue, offset in table.items():
        if not isinstance(offset, int):
            raise BadAnswer(f"offset {offset!r} of {queue} in {FILE_NAME} is not a number")
    return {queue: offset for queue, offset in table.items() if isinstance(offset, int)}


@final
class StartingOffsets:
    """Where a group begins in a queue: at its committed offset, or else as RocketMQ's RebalancePushImpl decides.

    *consume_from_ms* is the time for `ConsumeFrom.TIMESTAMP`, by default half an hour ago.

    Raises:
      TypeError, ValueError: an argument is wrong.
    """

    def __init__(self, network: Network, offsets: Offsets, consume_from: ConsumeFrom, consume_from_ms: int) -> None:
        _check_start(consume_from, consume_from_ms)
        self.consume_from = consume_from
        self._network = network
        self._offsets = offsets
        self._consume_from_ms = consume_from_ms or network.clock.now_ms() - HALF_HOUR_MS

    async def find(self, queue: MessageQueue) -> int:
        """Return the offset at which to begin in *queue*."""
        committed = await self._offsets.read(queue)
        if committed is not None and committed >= 0:
            return committed
        is_retry = queue.topic.startswith(RETRY_PREFIX)
        if self.consume_from is ConsumeFrom.FIRST or (is_retry and self.consume_from is ConsumeFrom.LAST):
            return 0
        if self.consume_from is ConsumeFrom.LAST or is_retry:
            return await max_offset(self._network, queue)
        return await search_offset(self._network, queue, self._consume_from_ms)


def _check_start(consume_from: object, consume_from_ms: object) -> None:
    check_type("consume_from", consume_from, ConsumeFrom, "for example ConsumeFrom.FIRST")
    check_time_ms("consume_from_ms", consume_from_ms)
    if consume_from_ms and consume_from is not ConsumeFrom.TIMESTAMP:
        raise ValueError(f"consume_from_ms {consume_from_ms} has no effect; give consume_from=ConsumeFrom.TIMESTAMP")
