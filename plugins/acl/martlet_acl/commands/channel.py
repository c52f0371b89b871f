"""Sends requests to the broker that uses a data directory; if none does, answers them from the files."""

import argparse
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, final

import msgspec
import trio
from msgspec.structs import replace

from martlet.app.config import Config, read_config
from martlet.cli.outcome import Unreachable
from martlet.config import fill, override, read_toml
from martlet.errors import Reason, Refused, StoreError, StoreLocked
from martlet.net.unix_sockets import connect_unix
from martlet.runtime.ids import Ids
from martlet.runtime.steps import Steps, finish_now
from martlet.store.disk.files import RealDisk
from martlet_acl.administration import Administration
from martlet_acl.answering import Requests
from martlet_acl.config import AclConfig
from martlet_acl.endpoint import NAME
from martlet_acl.files import AclFilesError
from martlet_acl.offline import OfflineFiles, has_files, locked
from martlet_acl.requests import AclAnswer, ListGroups, ListKeys, ListQuotas, ListRules, ListUsers, Report, Request

__all__ = [
    "Channel",
    "add_directory_options",
    "become_owner",
    "directory_of",
    "opened",
    "read_broker_config",
    "rows_of",
    "table_of",
]

TIMEOUT_S: Final = 60.0
LOCK_TRIES: Final = 20  # 2 s: other commands may be at work
RECEIVE_BYTES: Final = 1 << 16
ROOT: Final = 0
Listing = ListUsers | ListKeys | ListGroups | ListRules | ListQuotas | Report


class Channel(Protocol):
    """Where requests go."""

    def ask(self, request: Request) -> AclAnswer:
        """Return the answer. Raises `Refused` if it is an error."""
        ...


def add_directory_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the data directory."""
    group = parser.add_argument_group("Data directory options", "which broker, by its data directory")
    group.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        default=os.environ.get("MARTLET_CONFIG") or None,
        help="the broker's configuration file, which names its data directory. Default: $MARTLET_CONFIG, else none",
    )
    group.add_argument("--data", metavar="DIR", help="the data directory. Default: that of the configuration")
    group.add_argument(
        "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="set one key, overriding the file"
    )


def read_broker_config(arguments: Any) -> Config:
    """Return the broker's configuration. Raises `ConfigError`."""
    tables = read_toml(arguments.config) if arguments.config else {}
    for assignment in arguments.set:
        override(tables, assignment)
    return read_config(tables)


def directory_of(arguments: Any, config: Config) -> str:
    """Return the data directory."""
    return os.path.abspath(arguments.data or config.broker.data)


@contextmanager
def opened(arguments: Any) -> Iterator[Channel]:
    """Yield the channel to the broker of a data directory, or to its files.

    Raises:
      StoreError: neither can be used.
    """
    config = read_broker_config(arguments)
    directory = directory_of(arguments, config)
    path = f"{directory}/{NAME}"
    try:
        connection = connect_unix(path, TIMEOUT_S)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        with _offline(directory, config) as channel:
            yield channel
        return
    except PermissionError as error:
        raise StoreError(
            f"{path!r} is open to the broker's user and root only; run this command as one of them"
        ) from error
    with connection:
        yield _SocketChannel(connection, path)


@contextmanager
def _offline(directory: str, config: Config) -> Iterator[Channel]:
    disk = RealDisk()
    if not has_files(directory, disk):
        raise StoreError(f"data directory {directory!r} has no users and rules; run `martlet acl init`")
    settings = fill(AclConfig, table_of(config), "acl")
    become_owner(directory)
    try:
        with locked(directory, disk, LOCK_TRIES):
            files = OfflineFiles(directory, disk)
            administration = Administration(files, Ids().key, settings.password_cost)
            yield _FilesChannel(Requests(administration, None, _finish))
    except StoreLocked as error:
        text = "it is starting, or does not have the plugin acl"
        raise StoreLocked(f"{error}, or enable acl there: nothing answers at {NAME}, so {text}") from error
    except AclFilesError as error:
        raise StoreError("\n".join(error.problems)) from error


def table_of(config: Config) -> dict[str, object]:
    """Return the section ``[acl]``."""
    table = config.plugin_tables.get("acl", {})
    return table if isinstance(table, dict) else {}


def become_owner(directory: str) -> None:
    """Let root act as the owner of *directory*, so that the broker can read and replace what is written."""
    os.umask(0o077)
    status = os.stat(directory)
    if os.geteuid() == ROOT and status.st_uid != ROOT:
        os.setegid(status.st_gid)
        os.seteuid(status.st_uid)


async def _finish(steps: Steps[Any]) -> Any:
    return finish_now(steps)


@final
class _FilesChannel:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def ask(self, request: Request) -> AclAnswer:
        return _checked(trio.run(self._requests.answer, request))


@final
class _SocketChannel:
    def __init__(self, connection: socket.socket, path: str) -> None:
        self._connection = connection
        self._path = path
        self._data = b""

    def ask(self, request: Request) -> AclAnswer:
        try:
            self._connection.sendall(msgspec.json.encode(request) + b"\n")
            while b"\n" not in self._data:
                more = self._connection.recv(RECEIVE_BYTES)
                if not more:
                    raise Unreachable(f"the broker at {self._path!r} closed the connection; is it stopping?")
                self._data += more
        except OSError as error:
            raise Unreachable(f"the broker at {self._path!r} does not answer; {error.strerror or error}") from error
        line, _, self._data = self._data.partition(b"\n")
        return _checked(msgspec.json.decode(line, type=AclAnswer))


def _checked(answer: AclAnswer) -> AclAnswer:
    if answer.error:
        raise Refused(Reason(answer.reason or Reason.UNAVAILABLE.value), answer.error)
    return answer


def rows_of(channel: Channel, request: Listing) -> list[dict[str, Any]]:
    """Return all rows of a list."""
    rows: list[dict[str, Any]] = []
    while True:
        answer = channel.ask(request)
        rows += answer.rows
        if answer.place is None:
            return rows
        request = replace(request, place=answer.place)
