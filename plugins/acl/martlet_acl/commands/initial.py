"""``martlet acl init``: the first administrator."""

import argparse
from contextlib import suppress
from typing import Any

import trio

from martlet.cli.outcome import Exit
from martlet.cli.terminal import print_json
from martlet.config import fill
from martlet.errors import PluginError, StoreError, StoreLocked
from martlet.runtime.ids import Ids
from martlet.store.disk.files import RealDisk
from martlet_acl.commands.channel import (
    become_owner,
    directory_of,
    read_broker_config,
    table_of,
)
from martlet_acl.commands.secret_input import make_password, make_secret, read_from
from martlet_acl.config import AclConfig
from martlet_acl.credentials import SecretKey
from martlet_acl.offline import OfflineFiles, has_files, locked
from martlet_acl.passwords import SALT_BYTES, hash_password
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.members import UserRecord
from martlet_acl.state import AclState

__all__ = ["configure", "initialize"]

NAME = "acl"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--user", default="admin", metavar="NAME", help="the administrator; default %(default)s")
    parser.add_argument(
        "--password-file",
        metavar="FILE",
        help="read the password from this file, or from stdin if it is -. Default: make one and print it",
    )
    parser.add_argument("--observe", action="store_true", help="refuse nothing at first, and report what would be")
    parser.add_argument("--json", action="store_true", help="print JSON")


def initialize(arguments: Any) -> int:
    config = read_broker_config(arguments)
    directory, disk = directory_of(arguments, config), RealDisk()
    if has_files(directory, disk):
        text = "use `martlet acl user`, or remove config/acl.json* and config/acl.secrets*"
        raise StoreError(f"data directory {directory!r} has users and rules already; {text}")
    cost = fill(AclConfig, table_of(config), NAME).password_cost
    password = read_from(arguments.password_file) if arguments.password_file else make_password()
    secret = make_secret()
    state = AclState(observe=arguments.observe)
    try:
        state.put_user(arguments.user, UserRecord(administrator=True))
        state.put_password(arguments.user, hash_password(password.encode(), Ids().key()[:SALT_BYTES], cost))
        state.put_key(arguments.user, arguments.user, SecretKey(secret))
    except PolicyError as error:
        raise PluginError(str(error)) from error
    disk.make_directory(directory)
    become_owner(directory)
    with suppress(StoreLocked), locked(directory, disk):  # a broker without the plugin may run there
        pass
    trio.run(OfflineFiles(directory, disk, state).wait_saved)
    enabled = [*config.plugins.enabled, *([] if NAME in config.plugins.enabled else [NAME])]
    shown = {"user": arguments.user, "access_key": arguments.user, "secret": secret}
    if not arguments.password_file:
        shown["password"] = password
    _print(arguments, directory, shown, enabled)
    return Exit.OK


def _print(arguments: Any, directory: str, shown: dict[str, str], enabled: list[str]) -> None:
    if arguments.json:
        print_json({"directory": directory, **shown, "enabled": enabled, "observe": arguments.observe})
        return
    print(f"made config/acl.json and config/acl.secrets in {directory}")
    print("Keep these; they are shown only now:")
    for name, value in shown.items():
        print(f"  {name.replace('_', ' '):10}  {value}")
    quoted = ", ".join(f'"{name}"' for name in enabled)
    print(f"Enable access control in the broker's configuration, and restart it:\n\n[plugins]\nenabled = [{quoted}]")
