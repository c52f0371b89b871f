"""``martlet acl``: users, groups of users, access keys, rules and quotas."""

import argparse
from collections.abc import Callable
from typing import Any, Final

from martlet.contracts import Subcommand
from martlet_acl.commands import importing, initial, quotas, rules, users
from martlet_acl.commands.channel import add_directory_options
from martlet_acl.commands.secret_input import add_password_file

__all__ = ["COMMAND"]

EPILOG: Final = """\
examples:
  martlet acl init                                          make the files, an administrator and an access key
  martlet acl user add alice --group shop                   add a user; asks for the password
  martlet acl key add alice                                 give her an access key, and print its secret
  martlet acl allow group:shop publish,get 'topic:orders*'  let the members of a group send to some topics
  martlet acl allow everybody publish 'name:mqtt/{user}/#'  let each user publish below the own name in MQTT
  martlet acl deny everybody all topic:secret               deny what a less exact rule allows
  martlet acl list group:shop                               the rules of a group
  martlet acl quota set user:alice --messages-in 100        slow her down to 100 messages a second
  martlet acl explain alice publish topic:orders            say whether she may, by which rule, and why
  martlet acl observe report                                what would be refused, and commands that would allow it
  martlet acl import mosquitto-acl FILE --dry-run           show what would become of Mosquitto's acl_file
The commands work while the broker runs, as its user or root, and also while it does not.
A change is in effect and on disk when its command ends.
"""

NAME: Final = "of the user or group"
Work = Callable[[Any], int]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = _adder(parser, "ACTION")
    initial.configure(add("init", "make the files, with an administrator and an access key", initial.initialize))
    _configure_users(_inner(parser, add, "user", "add, change, remove, disable, enable or list users"))
    _configure_groups(_inner(parser, add, "group", "add, remove or list groups of users"))
    _configure_keys(_inner(parser, add, "key", "add, disable, enable, remove or list access keys"))
    _configure_rules(add)
    quotas.configure(_inner(parser, add, "quota", "set, remove or list quotas of users and groups"))
    importing.configure(add("import", "add users and rules of another broker's files", importing.add_files))


def _adder(parser: argparse.ArgumentParser, metavar: str) -> Callable[..., argparse.ArgumentParser]:
    """Return a function that adds a subcommand (name, help, work) to *parser*."""
    choices = parser.add_subparsers(metavar=metavar, required=True)

    def add(
        name: str, text: str, work: Work | None, *, as_json: bool = False, **fixed: object
    ) -> argparse.ArgumentParser:
        inner = choices.add_parser(
            name,
            help=text,
            description=f"{text[:1].upper()}{text[1:]}.",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if work is not None:
            add_directory_options(inner)
            inner.set_defaults(work=work, **fixed)
        if as_json:
            inner.add_argument("--json", action="store_true", help="print JSON")
        return inner

    return add


def _inner(
    parser: argparse.ArgumentParser, add: Callable[..., argparse.ArgumentParser], name: str, text: str
) -> Callable[..., argparse.ArgumentParser]:
    return _adder(add(name, text, None), "ACTION")


def _configure_users(add: Callable[..., argparse.ArgumentParser]) -> None:
    adding = add("add", "add a user", users.add_user)
    adding.add_argument("name", metavar="NAME", help=NAME)
    adding.add_argument("--administrator", action="store_true", help="may do everything")
    adding.add_argument("--group", metavar="GROUP", action="append", default=[], help="a group of the user; repeatable")
    which = adding.add_mutually_exclusive_group()
    add_password_file(which)
    which.add_argument("--no-password", action="store_true", help="the user has keys or certificates only")
    changing = add("set", "change a user", users.set_user)
    changing.add_argument("name", metavar="NAME", help=NAME)
    kind = changing.add_mutually_exclusive_group()
    kind.add_argument("--administrator", action="store_true", help="the user may do everything")
    kind.add_argument("--normal", action="store_true", help="the user may do what rules allow")
    changing.add_argument("--join", metavar="GROUP", action="append", default=[], help="add to a group; repeatable")
    changing.add_argument("--leave", metavar="GROUP", action="append", default=[], help="remove from it; repeatable")
    which = changing.add_mutually_exclusive_group()
    which.add_argument("--password", action="store_true", help="ask for a new password")
    add_password_file(which)
    which.add_argument("--no-password", action="store_true", help="remove the password")
    add("remove", "remove a user, with keys, rules and quota", users.remove_user).add_argument(
        "name", metavar="NAME", help=NAME
    )
    for name, text, disabled in (
        ("disable", "let a user do nothing, and end the user's connections", True),
        ("enable", "let a user log in again", False),
    ):
        add(name, text, users.switch_user, disabled=disabled).add_argument("name", metavar="NAME", help=NAME)
    add("list", "list users", users.list_users, as_json=True)


def _configure_groups(add: Callable[..., argparse.ArgumentParser]) -> None:
    adding = add("add", "put a group into other groups, and into no more", users.add_group)
    adding.add_argument("name", metavar="NAME", help=NAME)
    adding.add_argument(
        "--in", dest="into", metavar="GROUP", action="append", default=[], help="a group that it is in; repeatable"
    )
    removing = add("remove", "remove a group from all users and groups, with its rules and quota", users.remove_group)
    removing.add_argument("name", metavar="NAME", help=NAME)
    add("list", "list groups that are in other groups", users.list_groups, as_json=True)


def _configure_keys(add: Callable[..., argparse.ArgumentParser]) -> None:
    adding = add("add", "give a user an access key", users.add_key, as_json=True)
    adding.add_argument("user", metavar="USER", help="the name of the user")
    adding.add_argument("--key", metavar="KEY", help="its name; default: that of the user")
    adding.add_argument(
        "--secret-file",
        metavar="FILE",
        help="read the secret from this file, or from stdin if it is -. Default: make one",
    )
    for name, text, disabled in (
        ("disable", "refuse signatures by an access key", True),
        ("enable", "accept them again", False),
    ):
        add(name, text, users.switch_key, disabled=disabled).add_argument("key", metavar="KEY", help="its name")
    add("remove", "remove an access key", users.remove_key).add_argument("key", metavar="KEY", help="its name")
    listing = add("list", "list access keys, without their secrets", users.list_keys, as_json=True)
    listing.add_argument("user", metavar="USER", nargs="?", help="only those of this user")


def _configure_rules(add: Callable[..., argparse.ArgumentParser]) -> None:
    for decision in ("allow", "deny"):
        putting = add(decision, f"{decision} actions on a resource", rules.put_rule, decision=decision)
        rules.add_subject(putting)
        putting.add_argument(
            "actions", metavar="ACTION[,ACTION]", help="publish, subscribe, create, update, delete, get, list or all"
        )
        putting.add_argument("resource", metavar="RESOURCE", help="such as topic:orders*, name:mqtt/a/# or cluster")
        putting.add_argument(
            *("--from",), dest="networks", metavar="NETWORK", action="append", default=[], help="only there; repeatable"
        )
        _add_default(putting, "add it to the default rules, which count only if no custom rule matches")
    listing = add("list", "list rules", rules.list_rules, as_json=True)
    listing.add_argument("subject", metavar="SUBJECT", nargs="?", help="only those of this subject")
    removing = add("remove", "remove the rule of a subject on a resource", rules.remove_rule)
    rules.add_subject(removing)
    removing.add_argument("resource", metavar="RESOURCE", help="as the rule has it")
    _add_default(removing, "remove the default rule")
    explaining = add("explain", "say what a user may do, and which rule decides", rules.explain, as_json=True)
    explaining.add_argument("user", metavar="USER", help="the name of a user, or anonymous")
    explaining.add_argument("action", metavar="ACTION", help="such as publish")
    explaining.add_argument(
        "resource", metavar="RESOURCE", help="such as topic:orders or name:mqtt/a/b, without patterns"
    )
    explaining.add_argument("--from", dest="address", metavar="ADDRESS", help="the client's address")
    observing = add(
        "observe", "refuse nothing, enforce the rules, or report what would be refused", rules.observe, as_json=True
    )
    observing.add_argument(
        "what",
        metavar="on|off|report",
        nargs="?",
        choices=("on", "off", "report"),
        default="report",
        help="default report",
    )


def _add_default(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--default", action="store_true", help=text)


def run(arguments: Any) -> int:
    code: int = arguments.work(arguments)
    return code


COMMAND: Final = Subcommand(
    "acl", "manage users, groups of users, access keys, rules and quotas of a broker", configure, run
)
