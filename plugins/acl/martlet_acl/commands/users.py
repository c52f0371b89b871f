"""``martlet acl user``, ``group`` and ``key``."""

from typing import Any

from martlet.cli.outcome import Exit, UsageError
from martlet.cli.terminal import print_json, table
from martlet_acl.commands.channel import opened, rows_of
from martlet_acl.commands.secret_input import make_secret, read_from, read_password
from martlet_acl.requests import (
    AddUser,
    ListGroups,
    ListKeys,
    ListUsers,
    PutGroup,
    PutKey,
    RemoveGroup,
    RemoveKey,
    RemoveUser,
    SetUser,
    SwitchKey,
)

__all__ = [
    "add_group",
    "add_key",
    "add_user",
    "list_groups",
    "list_keys",
    "list_users",
    "remove_group",
    "remove_key",
    "remove_user",
    "set_user",
    "switch_key",
    "switch_user",
]

USER_HEADS = ("name", "administrator", "disabled", "groups", "password", "keys")
KEY_HEADS = ("user", "key", "disabled")
GROUP_HEADS = ("name", "groups")


def add_user(arguments: Any) -> int:
    password = None if arguments.no_password else read_password(arguments, arguments.name)
    with opened(arguments) as channel:
        channel.ask(AddUser(arguments.name, arguments.administrator, tuple(arguments.group), password))
    print(f"user {arguments.name} was added" + ("" if password else ", without a password"))
    return Exit.OK


def set_user(arguments: Any) -> int:
    password: str | None = None
    if arguments.no_password:
        password = ""
    elif arguments.password or arguments.password_file:
        password = read_password(arguments, arguments.name)
    is_administrator = True if arguments.administrator else False if arguments.normal else None
    join, leave = tuple(arguments.join), tuple(arguments.leave)
    if password is None and is_administrator is None and not join and not leave:
        raise UsageError("there is nothing to change; see `martlet acl user set --help`")
    with opened(arguments) as channel:
        channel.ask(SetUser(arguments.name, is_administrator, None, join, leave, password))
    print(f"user {arguments.name} was changed")
    return Exit.OK


def switch_user(arguments: Any) -> int:
    with opened(arguments) as channel:
        channel.ask(SetUser(arguments.name, disabled=arguments.disabled))
    print(f"user {arguments.name} is {'disabled' if arguments.disabled else 'enabled'}")
    return Exit.OK


def remove_user(arguments: Any) -> int:
    with opened(arguments) as channel:
        channel.ask(RemoveUser(arguments.name))
    print(f"user {arguments.name} was removed, with keys, rules and quota")
    return Exit.OK


def list_users(arguments: Any) -> int:
    with opened(arguments) as channel:
        rows = sorted(rows_of(channel, ListUsers()), key=lambda row: str(row["name"]))
    return _show(arguments, USER_HEADS, rows)


def add_key(arguments: Any) -> int:
    key = arguments.key or arguments.user
    secret = read_from(arguments.secret_file) if arguments.secret_file else make_secret()
    with opened(arguments) as channel:
        channel.ask(PutKey(arguments.user, key, secret))
    shown = {"user": arguments.user, "access_key": key}
    if not arguments.secret_file:
        shown["secret"] = secret
    if arguments.json:
        print_json(shown)
        return Exit.OK
    print(f"user {arguments.user} has the access key {key}")
    if not arguments.secret_file:
        print(f"Keep its secret, which is shown only now: {secret}")
    return Exit.OK


def switch_key(arguments: Any) -> int:
    with opened(arguments) as channel:
        channel.ask(SwitchKey(arguments.key, arguments.disabled))
    print(f"access key {arguments.key} is {'disabled' if arguments.disabled else 'enabled'}")
    return Exit.OK


def remove_key(arguments: Any) -> int:
    with opened(arguments) as channel:
        channel.ask(RemoveKey(arguments.key))
    print(f"access key {arguments.key} was removed")
    return Exit.OK


def list_keys(arguments: Any) -> int:
    with opened(arguments) as channel:
        rows = sorted(rows_of(channel, ListKeys(arguments.user or "")), key=lambda row: (row["user"], row["key"]))
    return _show(arguments, KEY_HEADS, rows)


def add_group(arguments: Any) -> int:
    with opened(arguments) as channel:
        channel.ask(PutGroup(arguments.name, tuple(arguments.into)))
    where = f"is in {', '.join(arguments.into)}" if arguments.into else "is in no other group"
    print(f"group {arguments.name} {where}")
    return Exit.OK


def remove_group(arguments: Any) -> int:
    with opened(arguments) as channel:
        channel.ask(RemoveGroup(arguments.name))
    print(f"group {arguments.name} was removed, with its rules and quota; nobody is in it")
    return Exit.OK


def list_groups(arguments: Any) -> int:
    with opened(arguments) as channel:
        rows = sorted(rows_of(channel, ListGroups()), key=lambda row: str(row["name"]))
    return _show(arguments, GROUP_HEADS, rows)


def _show(arguments: Any, heads: tuple[str, ...], rows: list[dict[str, Any]]) -> int:
    if arguments.json:
        print_json([{head: row[head] for head in heads} for row in rows])
    else:
        print(table(heads, [[_cell(row[head]) for head in heads] for row in rows]))
    return Exit.OK


def _cell(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value
