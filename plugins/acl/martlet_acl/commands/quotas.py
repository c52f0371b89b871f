"""``martlet acl quota``."""

import argparse
from collections.abc import Callable
from typing import Any, Final

from martlet.cli.outcome import Exit, UsageError
from martlet.cli.terminal import print_json, table
from martlet_acl.commands.channel import opened, rows_of
from martlet_acl.commands.rules import add_subject, print_notes
from martlet_acl.policy.quotas import LIMITS, StoredQuota, show_quota
from martlet_acl.requests import ListQuotas, RemoveQuota, SetQuota

__all__ = ["configure"]

TEXTS: Final = {
    "messages_in": "messages that clients send, a second",
    "bytes_in": "bytes of these, a second",
    "messages_out": "messages that clients receive, a second",
    "bytes_out": "bytes of these, a second",
    "connections": "connections at the same time",
    "subscriptions": "subscriptions of connected clients",
    "shared_groups": "different shared groups in which connected clients take part",
    "refuses": "refuse what is above a rate, instead of slowing the client down",
}
EPILOG: Final = """\
0 is no limit, and a limit that is not given stays as it is. The quota of a group is for all its members together, also
for those of groups that are in it. That of everybody is for each user without a quota of the own, that of anonymous
for all clients that have not logged in together.
"""


def configure(add: Callable[..., argparse.ArgumentParser]) -> None:
    setting = add("set", "limit a user, or the members of a group together", set_quota)
    setting.epilog = EPILOG
    add_subject(setting)
    for name, text in TEXTS.items():
        option = f"--{name.replace('_', '-')}"
        if name == "refuses":
            setting.add_argument(option, action=argparse.BooleanOptionalAction, help=text)
        else:
            setting.add_argument(option, metavar="N", type=int, help=text)
    add_subject(add("remove", "remove the quota of a subject", remove_quota))
    listing = add("list", "list quotas", list_quotas, as_json=True)
    listing.add_argument("subject", metavar="SUBJECT", nargs="?", help="only that of this subject")


def set_quota(arguments: Any) -> int:
    limits = {name: getattr(arguments, name) for name in LIMITS if getattr(arguments, name) is not None}
    if not limits:
        raise UsageError("there is nothing to change; see `martlet acl quota set --help`")
    with opened(arguments) as channel:
        row, *notes = channel.ask(SetQuota(arguments.subject, limits)).rows
    print_notes(notes)
    print(f"{arguments.subject}: {_shown(row)}")
    return Exit.OK


def remove_quota(arguments: Any) -> int:
    with opened(arguments) as channel:
        channel.ask(RemoveQuota(arguments.subject))
    print(f"{arguments.subject}: the quota was removed")
    return Exit.OK


def list_quotas(arguments: Any) -> int:
    with opened(arguments) as channel:
        rows = rows_of(channel, ListQuotas(arguments.subject or ""))
    if arguments.json:
        print_json(rows)
    else:
        print(table(("subject", "quota"), [(row["subject"], _shown(row)) for row in rows]))
    return Exit.OK


def _shown(row: dict[str, Any]) -> str:
    return show_quota(StoredQuota(**{name: row[name] for name in LIMITS}))
