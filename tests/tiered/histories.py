"""A table of the cold tier for tests of other programs, and the examples of docs/history.md."""

import datetime
import json
import re
import runpy
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from msgspec import Struct

from martlet.message import Message, Record, encode_properties
from martlet.records.codec import decode_record, encode_record
from martlet.records.compression import compress
from martlet_columns.records import Records
from martlet_tiered.delta import TableLog
from martlet_tiered.format.keys import keys_name
from martlet_tiered.format.writing import TABLE_SCHEMA, write_file
from martlet_tiered.names import DataName
from martlet_tiered.table import ColdTable

from .cold import Tier, now_ms

__all__ = ["BLOCKS", "DAY", "History", "make_history", "run"]

PAGE: Final = Path(__file__).parents[2] / "docs/history.md"
HOST: Final = bytes([127, 0, 0, 1, 0, 0, 0, 1])
DAY: Final = "2026-11-28"
DAY_MS: Final = int(datetime.datetime.fromisoformat(f"{DAY}T00:00:00+00:00").timestamp() * 1000)
BLOCK: Final = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", re.DOTALL | re.MULTILINE)
BLOCKS: Final = dict(BLOCK.findall(PAGE.read_text()))


class Stored(Struct, frozen=True):
    """A message: its record, its decompressed body, and the total in it."""

    record: Record
    body: bytes
    total: float


class History(Struct):
    """A table, and the messages that are in it, in their order in the log."""

    url: str
    messages: list[Stored]

    def of(self, topic: str, queue: int = -1) -> list[Stored]:
        """Return the messages of *topic*, or those of one queue of it."""
        found = [each for each in self.messages if each.record.topic == topic]
        return [each for each in found if queue in (-1, each.record.queue_id)]


def encode(number: int, position: int) -> tuple[bytes, Stored]:
    """Return the record of message *number*; each third one is compressed."""
    total = number * 7919 % 10_000 / 100
    body = json.dumps({"number": number, "total": total, "text": "x" * (number % 50)}).encode()
    stored, sys_flag = compress(body) if number % 3 == 0 else (body, 0)
    properties = encode_properties({"KEYS": f"order-{number}", "TAGS": "paid", "UNIQ_KEY": f"{number:032X}"})
    topic, queue = ("Orders", "Bills")[number % 2], number // 2 % 4
    message = Message(topic, stored, properties, queue, 0, sys_flag, DAY_MS + number, HOST)
    record = encode_record(message, queue, number // 8, position, DAY_MS + number, HOST)
    return bytes(record), Stored(decode_record(record), body, total)


def make_history(place: Path) -> History:
    """Upload 3,000 messages of two topics to *place*, in two ranges of the log."""
    tier = Tier(str(place))
    objects = tier.objects()
    table = ColdTable(objects, TableLog(objects, tier.location(), tier.config()), "broker-a")
    table.open(TABLE_SCHEMA)
    table.take_over(uuid4().hex)
    begin, kept = 0, []
    for part in range(2):
        data = bytearray()
        for number in range(1500 * part, 1500 * (part + 1)):
            record, stored = encode(number, begin + len(data))
            kept.append(stored)
            data += record
        name = DataName(DAY, "topic", table.epoch, begin, begin + len(data))
        made = write_file(name, "broker-a", Records(data), now_ms())
        objects.create(f"table/{name.path}", bytes(made.data))
        objects.create(keys_name(name.path), made.keys)
        table.append(name.begin, name.end, [made.file])
        begin = name.end
    return History(f"{place}/table", kept)


def run(program: str, history: History) -> Any:
    """Run the example of *program* on *history*, and return what it found."""
    code = BLOCKS[program]
    assert code.count('url = "/srv/history/table"') == 1
    file = Path(history.url).parent / "example.py"
    file.write_text(code.replace("/srv/history/table", history.url))
    return runpy.run_path(str(file))["found"]
