"""``martlet acl import``: users and rules of other brokers' files."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from martlet.cli.outcome import Exit
from martlet.cli.terminal import table
from martlet.errors import StoreError
from martlet_acl.commands.channel import opened
from martlet_acl.imports.findings import Imported, ImportedRule, ImportedUser
from martlet_acl.imports.mosquitto import read_acl_file, read_password_file
from martlet_acl.imports.rabbitmq import read_definitions
from martlet_acl.imports.rocketmq import read_plain_acl
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.rules import DENY
from martlet_acl.requests import AddImported

__all__ = ["add_files", "configure"]

T = TypeVar("T")

FORMATS: Final[Mapping[str, str]] = {
    "rocketmq": "plain_acl.yml and the files in conf/acl of ACL 1.0",
    "mosquitto-passwords": "the password_file",
    "mosquitto-acl": "the acl_file",
    "rabbitmq": "definitions that rabbitmqctl export_definitions wrote, as JSON",
}
# Users and rules of one request, which one write makes durable: half of the longest line.
AT_ONCE: Final = 50
HEADS: Final = ("subject", "level", "decision", "actions", "resource")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "formats:\n" + "".join(f"  {name:20} {text}\n" for name, text in FORMATS.items())
    parser.add_argument("format", metavar="FORMAT", choices=FORMATS, help=", ".join(FORMATS))
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="what to read")
    parser.add_argument("--dry-run", action="store_true", help="show users and rules, and add none")
    parser.add_argument("--vhost", default="/", help="RabbitMQ: the virtual host of the rules; default %(default)s")
    parser.add_argument("--topic", default="mqtt", help="the topic with the names of MQTT; default %(default)s")


def add_files(arguments: Any) -> int:
    found: list[Imported] = []
    users: dict[str, ImportedUser] = {}
    for path in arguments.files:
        found.append(_read(arguments, path, users))
        users = {**found[-1].users, **users}
    rules = [rule for each in found for rule in each.rules]
    for path, each in zip(arguments.files, found, strict=True):
        for remark in each.remarks:
            print(f"{path.name}: {remark}", file=sys.stderr)
    if arguments.dry_run:
        _show(users.values(), rules)
    else:
        for text in _add(arguments, list(users.values()), rules):
            print(f"left out: {text}", file=sys.stderr)
        print(f"imported {len(users)} users and {len(rules)} rules")
    return Exit.OK


def _read(arguments: Any, path: Path, known: Mapping[str, ImportedUser]) -> Imported:
    """Return what a file has; *known* are users of earlier files. Raises `StoreError`."""
    try:
        data = path.read_bytes()
        match arguments.format:
            case "rabbitmq":
                return read_definitions(data, arguments.vhost, arguments.topic)
            case "mosquitto-passwords":
                return read_password_file(data.decode())
            case "mosquitto-acl":
                return read_acl_file(data.decode(), arguments.topic)
            case _:
                return read_plain_acl(data.decode(), known)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read; {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StoreError(f"{str(path)!r} is no text in UTF-8") from error
    except PolicyError as error:
        raise StoreError(f"{str(path)!r}: {error}") from error


def _add(arguments: Any, users: Sequence[ImportedUser], rules: Sequence[ImportedRule]) -> list[str]:
    """Add what denies, then what allows, then users, who can use neither before; return what is left out."""
    left_out: list[str] = []
    denials = [each for each in rules if each.rule.decision == DENY]
    others = [each for each in rules if each.rule.decision != DENY]
    with opened(arguments) as channel:
        requests = [AddImported(rules=tuple(some)) for some in _parts([*denials, *others])]
        requests += [AddImported(tuple(some)) for some in _parts(users)]
        for request in requests:
            left_out += (str(row["left_out"]) for row in channel.ask(request).rows)
    return left_out


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[begin : begin + AT_ONCE] for begin in range(0, len(items), AT_ONCE))


def _show(users: Iterable[ImportedUser], rules: Iterable[ImportedRule]) -> None:
    rows = [
        (user.name, user.administrator, bool(user.password), bool(user.secret), user.connections or None)
        for user in users
    ]
    print(table(("user", "administrator", "password", "key", "connections"), rows))
    print()
    print(
        table(
            HEADS,
            [
                (each.subject, each.level, each.rule.decision, ", ".join(each.rule.actions), each.rule.resource)
                for each in rules
            ],
        )
    )
