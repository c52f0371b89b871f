"""``martlet timer``: count, list and recall pending timed messages."""

import argparse
from typing import Any, Final

from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json
from martlet.contracts import Subcommand
from martlet_client import Admin, ClientError
from martlet_remoting.commands.common import day_time, print_rows, subcommands
from martlet_remoting.commands.connecting import talking
from martlet_remoting.commands.values import whole
from martlet_remoting.wire.answers.bodies import load_object
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.recall_handles import decode_handle

__all__ = ["COMMAND"]

PRODUCER_GROUP: Final = "martlet_tools"
LISTED: Final = 100
LISTED_MAX: Final = 1000

EPILOG = """\
examples:
  martlet timer count                 how many messages are pending on each broker, and when they are due
  martlet timer list                  the next 100 of each broker: due time, topic, id, repetitions, recall handle
  martlet timer list --count 5 --json
  martlet timer recall djEgb3JkZXJz   recall the message with this handle; if it is repeated, it ends
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = subcommands(parser, EPILOG)
    add("count", "count the messages that are pending until a time of their own", show_count)
    listing = add("list", "list them in the order in which they are due", show_list)
    listing.add_argument(
        "--count",
        type=whole("--count", 1),
        default=LISTED,
        metavar="N",
        help=f"at most this many of each broker, up to {LISTED_MAX}; default {LISTED}",
    )
    recall = add("recall", "recall a pending message", do_recall)
    recall.add_argument("handle", help="its recall handle, from the answer to its send or from `martlet timer list`")


async def _ask(arguments: Any, count: int) -> dict[str, dict[str, Any]]:
    """Return the answer of each broker."""
    async with Admin(arguments.settings) as admin:
        masters = (await admin.cluster()).masters()
        if not masters:
            raise ClientError("no broker is registered with the name server; `martlet run` starts one")
        found: dict[str, dict[str, Any]] = {}
        for name, address in masters.items():
            answer = await admin.network.ask(address, RequestCode.GET_TIMER_METRICS, {"from": 0, "count": count})
            found[name] = {str(key): value for key, value in load_object(answer.body).items()}
    return found


async def show_count(arguments: Any) -> int:
    heads = ("broker", "pending", "within 1 minute", "1 hour", "1 day")
    rows: list[tuple[object, ...]] = []
    for name, told in (await _ask(arguments, 0)).items():
        within = told.get("timerDist", {})
        rows.append((name, told.get("pending"), *[within.get(seconds) for seconds in ("60", "3600", "86400")]))
    print_rows(heads, rows, as_json=arguments.json)
    return Exit.OK


async def show_list(arguments: Any) -> int:
    answers = await _ask(arguments, arguments.count)
    messages = [{"broker": name, **each} for name, answer in answers.items() for each in answer.get("messages", [])]
    messages.sort(key=lambda each: (each["due"], each["broker"]))
    if arguments.json:
        print_json(messages)
        return Exit.OK
    rows = [
        [day_time(each["due"]), each["topic"], each["msgId"], each.get("repeats") or "-", each["recallHandle"]]
        for each in messages
    ]
    print_rows(("due", "topic", "id", "repeats", "recall handle"), rows, as_json=False)
    return Exit.OK


async def do_recall(arguments: Any) -> int:
    try:
        handle = decode_handle(arguments.handle)
    except ValueError as error:
        raise ClientError(str(error)) from error
    topic = handle.topic
    async with Admin(arguments.settings) as admin:
        address = (await admin.cluster()).masters().get(handle.broker)
        if address is None:
            raise ClientError(f"no broker {handle.broker!r} is registered with the name server; the handle is for it")
        ext = {"producerGroup": PRODUCER_GROUP, "topic": topic, "recallHandle": arguments.handle}
        answer = await admin.network.ask(address, RequestCode.RECALL_MESSAGE, ext)
    if answer.remark:
        raise ClientError(answer.remark)
    message_id = answer.text("msgId", "")
    if arguments.json:
        print_json({"topic": topic, "recalled": message_id})
    else:
        print(f"message {message_id} of topic {topic} is recalled")
    return Exit.OK


COMMAND = Subcommand("timer", "count, list and recall messages that wait for their time", configure, talking())
