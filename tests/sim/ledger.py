"""A simulated plugin with state from the log: a projection, a journal, and atomic groups that tie them together.

The projection knows every message of the clients' topics and every note of its journal. `move` stores groups of two
messages and a note. Whatever happens to the machine, after a start the state is what the log says, the log has all
of a group or nothing, and what was acknowledged is there.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, final
from zlib import crc32

import trio

from martlet.errors import Refused, StoreFailed
from martlet.message import Message
from martlet.records.layout import RecordView, record_views
from martlet.runtime.steps import Steps
from martlet.state import NOTHING, pack_rows, unpack_rows
from martlet.state.journal import read_notes
from martlet.store import Store
from martlet.testing.stores import HOST, placed_of

from .bodies import key_of, make_body, properties_of

if TYPE_CHECKING:
    from .life import Life
    from .world import World

__all__ = ["JOURNAL", "Ledger", "Row", "move", "row_of", "rows_in"]

JOURNAL: Final = "ledger"
FORMAT: Final = 1

# Topic, queue id, queue offset, CRC of the body, and the keys of what is in it.
Row: TypeAlias = tuple[str, int, int, int, tuple[str, ...]]


def row_of(record: RecordView, journal: str) -> Row:
    """What the ledger knows of *record*."""
    body = bytes(record.body)
    keys = [note.decode() for note in read_notes(body)] if record.topic == journal else [key_of(body)]
    return record.topic, record.queue_id, record.queue_offset, crc32(body), tuple(keys)


def rows_in(store: Store, topics: frozenset[str], journal: str) -> dict[int, Row]:
    """What the ledger should know, by log position: read from everything readable of *topics* in *store*."""
    found: dict[int, Row] = {}
    for topic in sorted(topics):
        for queue in store.queues.topics.get(topic, {}).values():
            offset = queue.first_offset
            while offset < store.readers.end_offset(queue):
                result = store.readers.read(queue, offset, 32, 65536)
                for record in record_views(b"".join(result.pieces)):  # a record may go on in the next piece
                    found[record.position] = row_of(record, journal)
                if result.next_offset <= offset:
                    break
                offset = result.next_offset
    return found


@final
class Ledger:
    """The projection."""

    def __init__(self, topics: Sequence[str], journal: str) -> None:
        self.name = "ledger"
        self.journal = journal
        self.topics = frozenset((*topics, journal))
        self.rows: dict[int, Row] = {}

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            self.rows[record.position] = row_of(record, self.journal)

    def freeze(self) -> Steps[Sequence[bytes]]:
        return pack_rows(FORMAT, self.rows.copy().items())

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self.rows = {}
        for position, (topic, queue_id, offset, crc, keys) in unpack_rows(FORMAT, data):
            if position >= first_position:
                self.rows[position] = topic, queue_id, offset, crc, tuple(keys)
            yield

    def forget(self, topic: str) -> None:
        self.rows = {position: row for position, row in self.rows.items() if row[0] != topic}

    def floor(self) -> int:
        return NOTHING

    def roll(self, start: int, end: int) -> Steps[None]:
        yield from ()


async def move(world: "World", life: "Life", chance: random.Random) -> None:
    """Store a group now and then, until it is calm; tell the checker when it is as durable as an answer may say."""
    broker, plan = life.broker, world.plan
    journal, store = broker.journal(JOURNAL), broker.store
    while not world.calm:
        await trio.sleep(chance.uniform(0.01, 1.0))
        topics = [topic for topic in (f"topic-{number}" for number in range(plan.topics)) if broker.topics.get(topic)]
        if not topics:
            continue
        number = world.moves = world.moves + 1
        messages: list[Message] = []
        for name in ("a", "b"):
            body = make_body(name, number, chance)[:1000]
            world.checker.held.expect("", body)
            properties = properties_of(body, plan.light).encode()
            messages.append(
                Message(
                    chance.choice(topics), body, properties, chance.randrange(plan.queues), born_ms=1, born_host=HOST
                )
            )
        try:
            notes = [(journal, str(number).encode())]
            placed = placed_of(broker.publish_all(messages, atomic=True, notes=notes))
            end = store.appended
            store.committer.commit()
            if world.checker.sync:
                await store.flusher.wait_durable(end)
        except (Refused, StoreFailed):
            continue
        world.checker.on_move(life, number, list(zip(messages, placed, strict=True)))
