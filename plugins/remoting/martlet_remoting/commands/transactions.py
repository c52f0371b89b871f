"""``martlet tx``: list, show, commit and roll back pending transactions; list producers of external ones."""

import argparse
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, cast

from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json, table
from martlet.contracts import Subcommand
from martlet_client import Admin, ClientError
from martlet_remoting.commands.common import day_time, print_rows, subcommands
from martlet_remoting.commands.connecting import talking
from martlet_remoting.commands.values import whole
from martlet_remoting.wire.answers.bodies import load_object
from martlet_remoting.wire.codes import RequestCode

__all__ = ["COMMAND"]

PAGE: Final = 500
COMMIT, ROLLBACK = 0x8, 0xC
PRODUCER_COLUMNS: Final = (
    *("broker", "identity", "producer", "epoch", "run", "committed"),
    *("prepared", "delivering", "parts", "messages", "bytes", "ended", "unused_h"),
)
COLUMNS: Final = ("broker", "number", "id", "group", "topic", "stored", "checks", "bytes")

EPILOG = """\
examples:
  martlet tx list                           pending transactions, the oldest first
  martlet tx list --count 5 --json
  martlet tx show 7F0000010A2C18B4AAC2      everything about one: by its id, or by its number in the list
  martlet tx commit 7F0000010A2C18B4AAC2    deliver its message, as if its producer had committed
  martlet tx rollback 12                    drop its message
  martlet tx producers                      who writes external transactions, and what is staged
"""

Row = Mapping[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    add = subcommands(parser, EPILOG)
    listing = add("list", "list pending transactions", show_list)
    listing.add_argument("--count", type=whole("--count", 1), metavar="N", help="stop after this many")
    add("producers", "list producers of external transactions, and what they have staged", show_producers)
    for name, text, work in (
        ("show", "show a pending transaction", show_one),
        ("commit", "commit a pending transaction: deliver its message", commit),
        ("rollback", "roll back a pending transaction: drop its message", roll_back),
    ):
        add(name, text, work).add_argument("transaction", help="id of the transaction, or its number in the list")


async def show_list(arguments: Any) -> int:
    rows: list[tuple[object, ...]] = []
    async with Admin(arguments.settings) as admin:
        async for broker, _, row in _pending(admin, arguments.count):
            stored = day_time(row["storeTimestamp"])
            values = row["transactionId"], row["producerGroup"], row["topic"], stored, row["checks"], row["bodyBytes"]
            rows.append((broker, row["tranStateTableOffset"], *values))
    print_rows(COLUMNS, rows, as_json=arguments.json)
    return Exit.OK


async def _pending(admin: Admin, count: int | None) -> AsyncIterator[tuple[str, str, Row]]:
    """Yield broker, address and fields of up to *count* pending transactions."""
    for broker, address in (await admin.cluster()).masters().items():
        offset = 0
        while count is None or count > 0:
            page = PAGE if count is None else min(count, PAGE)
            rows = await _ask(admin, address, {"offset": offset, "count": page})
            for row in rows:
                yield broker, address, row
            count = None if count is None else count - len(rows)
            if not rows:
                break
            offset = rows[-1]["tranStateTableOffset"] + 1


async def _ask(admin: Admin, address: str, ext: Mapping[str, object]) -> list[Row]:
    answer = await admin.network.ask(address, RequestCode.LIST_TRANSACTIONS, ext)
    return cast(list[Row], load_object(answer.body).get("transactions") or [])


async def show_producers(arguments: Any) -> int:
    rows: list[tuple[object, ...]] = []
    async with Admin(arguments.settings) as admin:
        for broker, address in (await admin.cluster()).masters().items():
            async for row in _producers(admin, address):
                staged = row["prepared"], row["delivering"], row["parts"], row["messages"], row["bytes"]
                known = row["identity"], row["name"], row["epoch"], row["run"], row["committed"]
                rows.append((broker, *known, *staged, row["is_ended"], row["unused_hours"]))
    print_rows(PRODUCER_COLUMNS, rows, as_json=arguments.json)
    return Exit.OK


async def _producers(admin: Admin, address: str) -> AsyncIterator[Row]:
    after = {"identity": "", "producer": ""}
    while True:
        ext = {**after, "count": PAGE}
        answer = await admin.network.ask(address, RequestCode.LIST_EXTERNAL_TRANSACTIONS, ext)
        rows = cast(list[Row], load_object(answer.body).get("producers") or [])
        for row in rows:
            yield row
        if len(rows) < PAGE:
            return
        after = {"identity": rows[-1]["identity"], "producer": rows[-1]["name"]}


async def _find(admin: Admin, transaction: str) -> tuple[str, Row]:
    """Return the broker's address and the fields of the pending *transaction*."""
    matches: list[tuple[str, Row]] = []
    for address in (await admin.cluster()).masters().values():
        number = int(transaction) if transaction.isdigit() and len(transaction) < 19 else -1
        if number >= 0:
            rows = await _ask(admin, address, {"offset": number, "count": 1})
            matches += [(address, row) for row in rows if row["tranStateTableOffset"] == number]
        else:
            matches += [(address, row) for row in await _ask(admin, address, {"transactionId": transaction})]
    if not matches:
        raise ClientError(f"transaction {transaction!r} is not pending; `martlet tx list` lists those that are")
    if len(matches) > 1:
        numbers = ", ".join(str(row["tranStateTableOffset"]) for _, row in matches)
        raise ClientError(
            f"transaction {transaction!r} is pending {len(matches)} times; give one of the numbers {numbers}"
        )
    return matches[0]


async def show_one(arguments: Any) -> int:
    async with Admin(arguments.settings) as admin:
        _, row = await _find(admin, arguments.transaction)
    if arguments.json:
        print_json(row)
    else:
        flat = {name: value for name, value in row.items() if name != "properties"}
        print(table(("field", "value"), [*flat.items(), *sorted(row["properties"].items())]))
    return Exit.OK


async def commit(arguments: Any) -> int:
    return await _end(arguments, COMMIT, "committed")


async def roll_back(arguments: Any) -> int:
    return await _end(arguments, ROLLBACK, "rolled back")


async def _end(arguments: Any, how: int, done: str) -> int:
    async with Admin(arguments.settings) as admin:
        address, row = await _find(admin, arguments.transaction)
        names = "producerGroup", "tranStateTableOffset", "commitLogOffset", "msgId", "transactionId", "topic"
        ext = {name: row[name] for name in names}
        ext |= {"commitOrRollback": how, "fromTransactionCheck": True}
        await admin.network.ask(address, RequestCode.END_TRANSACTION_AS_ADMIN, ext)
    if arguments.json:
        print_json({"transactionId": row["transactionId"], "state": done})
    else:
        print(f"{done} transaction {row['transactionId']} to topic {row['topic']}")
    return Exit.OK


COMMAND = Subcommand("tx", "list, show, commit and roll back transactions", configure, talking())
