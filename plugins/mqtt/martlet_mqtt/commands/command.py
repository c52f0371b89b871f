"""``martlet mqtt``: publish, subscribe, clients, subscriptions, shared, forget, retained, kick."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from martlet.cli.outcome import Exit, UsageError, guarded
from martlet.cli.server import add_server_options, server_settings
from martlet.cli.terminal import body_fields, print_json, print_json_line, table
from martlet.contracts import Subcommand
from martlet_mqtt.admin.control import PREFIX
from martlet_mqtt.commands.client import MqttClient, MqttFailed, request_properties
from martlet_mqtt.wire.packets import FilterSubscription, Publish
from martlet_mqtt.wire.properties import Property

__all__ = ["COMMAND"]

ADDRESS: Final = "127.0.0.1:1883"
EPILOG: Final = """\
examples:
  martlet mqtt publish home/door open --qos 1 --retain
  martlet mqtt publish home/image - < picture.jpg     the payload is stdin
  martlet mqtt subscribe 'home/#'                      until Ctrl-C
  martlet mqtt subscribe 'home/#' --count 1 --json     one message, as JSON
  martlet mqtt clients                                 sessions, connected or not
  martlet mqtt subscriptions --client sensor-7
  martlet mqtt shared                                  shared subscriptions, also without members
  martlet mqtt forget '$share/workers/jobs/#'          free one; later members begin with new messages
  martlet mqtt retained 'home/#'                       names with a retained message
  martlet mqtt kick sensor-7                           disconnect a client
"""


def configure(parser: argparse.ArgumentParser) -> None:
    choices = parser.add_subparsers(metavar="ACTION", required=True)
    parser.epilog = EPILOG

    def add(name: str, text: str, work: Callable[[Any], int]) -> argparse.ArgumentParser:
        own = [line for line in EPILOG.splitlines() if f"{line} ".startswith(f"  {parser.prog} {name} ")]
        inner = choices.add_parser(
            name,
            help=text,
            description=f"{text[:1].upper()}{text[1:]}.",
            epilog="\n".join(["examples:", *own]),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_server_options(inner, "MQTT", ADDRESS)
        inner.add_argument("--json", action="store_true", help="print JSON")
        inner.set_defaults(work=work)
        return inner

    publish = add("publish", "publish a message", do_publish)
    publish.add_argument("topic", help="topic name")
    publish.add_argument("payload", nargs="?", default="", help="the payload; - reads it from stdin; default empty")
    publish.add_argument("--qos", type=int, choices=(0, 1, 2), default=1, help="default %(default)s")
    publish.add_argument("--retain", action="store_true", help="keep it for later subscribers; an empty one removes it")
    publish.add_argument("--expiry", type=int, metavar="SECONDS", help="how long it is valid")
    publish.add_argument("--content-type", metavar="TYPE", help="such as application/json")
    publish.add_argument(
        "--property", action="append", default=[], metavar="NAME=VALUE", help="user property; can be repeated"
    )
    subscribe = add("subscribe", "print the messages of topic filters", do_subscribe)
    subscribe.add_argument("filter", nargs="+", help="topic filter; + is one level, # any number of levels at the end")
    subscribe.add_argument("--qos", type=int, choices=(0, 1, 2), default=1, help="default %(default)s")
    subscribe.add_argument("--count", type=int, metavar="N", help="end after N messages; default never")
    subscribe.add_argument("--for", dest="for_s", type=float, metavar="SECONDS", help="end after this time")
    subscribe.add_argument("--no-retained", action="store_true", help="leave out retained messages")
    add("clients", "list sessions and their clients", show_clients)
    listing = add("subscriptions", "list the topic filters of sessions", show_subscriptions)
    listing.add_argument("--client", metavar="ID", help="of this client alone")
    add("shared", "list shared subscriptions, with members or without", show_shared)
    forget = add("forget", "forget a shared subscription without members, with what waits for it", do_forget)
    forget.add_argument("filter", help="such as $share/workers/jobs/#")
    retained = add("retained", "list the names with a retained message", show_retained)
    retained.add_argument("filter", nargs="?", default="#", help="topic filter; default %(default)s")
    kick = add("kick", "disconnect a client; its session stays", do_kick)
    kick.add_argument("client", help="client identifier")


def run(arguments: Any) -> int:
    """Run the subcommand; return the exit code."""
    work: Callable[[Any], int] = arguments.work
    return guarded(work, arguments)


def do_publish(arguments: Any) -> int:
    payload = sys.stdin.buffer.read() if arguments.payload == "-" else arguments.payload.encode()
    user = [_pair(text) for text in arguments.property]
    properties = request_properties(
        user, {Property.MESSAGE_EXPIRY: arguments.expiry, Property.CONTENT_TYPE: arguments.content_type}
    )
    with MqttClient(server_settings(arguments)) as client:
        client.publish(Publish(arguments.topic, payload, arguments.qos, arguments.retain, properties=properties))
    if arguments.json:
        print_json({"topic": arguments.topic, "bytes": len(payload), "qos": arguments.qos})
    else:
        print(f"published {len(payload):,} bytes to {arguments.topic}")
    return Exit.OK


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"property {text!r} has no value; write NAME=VALUE")
    return name, value


def do_subscribe(arguments: Any) -> int:
    deadline = time.monotonic() + arguments.for_s if arguments.for_s is not None else None
    left = arguments.count
    handling = 2 if arguments.no_retained else 0
    with MqttClient(server_settings(arguments)) as client:
        client.subscribe(
            *(FilterSubscription(each, arguments.qos, retain_handling=handling) for each in arguments.filter)
        )
        while left is None or left > 0:
            message = client.next_message(deadline)
            if message is None:
                break
            _show(message, as_json=arguments.json)
            left = left - 1 if left is not None else None
    return Exit.OK


def _show(message: Publish, *, as_json: bool) -> None:
    if as_json:
        fields: dict[str, object] = {"topic": message.topic, "qos": message.qos, "retain": message.retain}
        user = [list(pair) for pair in message.properties.user]
        print_json_line({**fields, "properties": user, **body_fields(message.payload)})
    else:
        text = message.payload.decode("utf-8", "backslashreplace")
        print(message.topic, "".join(c if c.isprintable() else repr(c)[1:-1] for c in text))
    sys.stdout.flush()


def _rows(arguments: Any, command: str, **request: object) -> Iterator[dict[str, Any]]:
    """Yield the rows of the answer to an administrator's request. Raises `MqttFailed`."""
    asked = {name: value for name, value in request.items() if value is not None}
    with MqttClient(server_settings(arguments)) as client:
        client.publish(Publish(f"{PREFIX}{command}", orjson.dumps(asked)))
        is_done = False
        while not is_done:
            message = client.next_message(time.monotonic() + arguments.timeout)
            if message is None:
                raise MqttFailed(f"no answer to {command!r} came within {arguments.timeout:g} s; is this Martlet?")
            answer = orjson.loads(message.payload)
            if "error" in answer:
                raise MqttFailed(answer["error"])
            yield from answer["rows"]
            is_done = answer["done"]


def _print(rows: list[dict[str, Any]], heads: tuple[str, ...], *, as_json: bool) -> int:
    if as_json:
        print_json(rows)
    else:
        print(table(heads, [[row.get(head) for head in heads] for row in rows]))
    return Exit.OK


def show_clients(arguments: Any) -> int:
    rows = sorted(_rows(arguments, "clients"), key=lambda row: str(row["client"]))
    heads = ("client", "connected", "user", "address", "version", "subscriptions", "in_flight", "missed", "will")
    for row in rows if not arguments.json else ():
        if row.get("missed", 0) is None:
            row["missed"] = "?"
    return _print(rows, heads, as_json=arguments.json)


def show_subscriptions(arguments: Any) -> int:
    rows = list(_rows(arguments, "subscriptions", client=arguments.client))
    rows.sort(key=lambda row: (row["client"], row["filter"]))
    return _print(rows, ("client", "filter", "qos", "no_local", "identifier", "selector"), as_json=arguments.json)


def show_shared(arguments: Any) -> int:
    rows = sorted(_rows(arguments, "shared"), key=lambda row: (row["filter"], row["topic"]))
    return _print(rows, ("filter", "topic", "members", "held"), as_json=arguments.json)


def do_forget(arguments: Any) -> int:
    rows = list(_rows(arguments, "forget", filter=arguments.filter))
    if not rows:
        raise MqttFailed(f"nothing is known of {arguments.filter!r}; list all with `martlet mqtt shared`")
    print_json(rows) if arguments.json else print(f"{arguments.filter} is forgotten; later members get new messages")
    return Exit.OK


def show_retained(arguments: Any) -> int:
    rows = sorted(_rows(arguments, "retained", filter=arguments.filter), key=lambda row: str(row["name"]))
    return _print(rows, ("name", "position"), as_json=arguments.json)


def do_kick(arguments: Any) -> int:
    (row,) = _rows(arguments, "kick", client=arguments.client)
    if not row["kicked"]:
        raise MqttFailed(f"client {arguments.client!r} is not connected; list clients with `martlet mqtt clients`")
    print_json(row) if arguments.json else print(f"client {arguments.client} is disconnected; its session stays")
    return Exit.OK


COMMAND: Final = Subcommand("mqtt", "publish, subscribe, and see clients of an MQTT broker", configure, run)
