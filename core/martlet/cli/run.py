"""``martlet run``: a whole broker in this process."""

import argparse
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from martlet.app import logs
from martlet.cli.outcome import Exit
from martlet.cli.terminal import Bar
from martlet.config import override, read_toml
from martlet.contracts import Subcommand
from martlet.runtime.clock import process_age_s
from martlet.runtime.gc_schedule import OldObjects
from martlet.runtime.malloc_trim import FreedMemory

if TYPE_CHECKING:
    from martlet.app.config import Config

__all__ = ["COMMAND", "configure", "read", "serve"]

log = logging.getLogger("martlet")

EXTEND_US: Final = 60_000_000

EPILOG = """\
examples:
  martlet run                                        a broker on loopback, data in ./martlet-data
  martlet run --config martlet.toml                  with this configuration; `martlet config` prints a template
  martlet run --data /var/lib/martlet --log json     another data directory, and a log in JSON
  martlet run --set store.flush=async --set remoting.listen=0.0.0.0:10911 --set broker.advertise=mq.example.org

Once it accepts connections it prints one line:
  martlet ready: remoting=127.0.0.1:10911 nameserver=127.0.0.1:9876 mqtt=127.0.0.1:1883 \
stomp=127.0.0.1:61613 kernel=python data=/home/me/martlet-data in 0.21 s
SIGTERM and Ctrl-C stop it cleanly; SIGHUP reloads certificates.
Exit codes: 0 clean shutdown; 1 failure; 2 invalid command line or configuration; 3 data directory in use or failed;
4 a port is in use.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        default=os.environ.get("MARTLET_CONFIG") or None,
        help="read the configuration from this TOML file; default: $MARTLET_CONFIG, else none",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="store all data in this directory; short for --set broker.data=DIR"
    )
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="set one key, overriding the file; can be repeated",
    )
    parser.add_argument("--log", choices=("text", "json"), help="log format on stderr; short for --set log.format=")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="lowest level to log; short for --set log.level=",
    )


def read(arguments: argparse.Namespace) -> "Config":
    """Return the configuration from the command line and its file. Raises `ConfigError`."""
    from martlet.app.config import read_config

    tables = read_toml(arguments.config) if arguments.config else {}
    for assignment in arguments.set:
        override(tables, assignment)
    short = (
        ("broker", "data", arguments.data),
        ("log", "format", arguments.log),
        ("log", "level", arguments.log_level),
    )
    for section, key, value in short:
        table = tables.setdefault(section, {})
        if value is not None and isinstance(table, dict):
            table[key] = value
    return read_config(tables)


def start(arguments: argparse.Namespace) -> int:
    return serve(read(arguments))


def serve(config: "Config") -> int:
    """Run a broker with *config* until a signal stops it; return the exit code."""
    import trio

    from martlet.app.startup import notify_systemd, run
    from martlet.runtime.installed import installed_version
    from martlet.runtime.native import kernel_name

    logs.configure(config.log)
    os.umask(0o077)  # no other user may read messages
    bar = Bar("recovering", "B")

    def report(done: int, total: int, records: int) -> None:
        bar.update(done, total, f"{records:,} records")
        # Recovery may outlast systemd's start timeout, so extend the timeout.
        notify_systemd(f"EXTEND_TIMEOUT_USEC={EXTEND_US}\nSTATUS=recovering, {records:,} records read", os.environ)

    def ready(addresses: dict[str, str]) -> None:
        bar.close()
        old = OldObjects()
        old.start()
        trio.lowlevel.spawn_system_task(old.run)
        freed = FreedMemory()
        freed.start()
        trio.lowlevel.spawn_system_task(freed.run)
        # Omit a protocol's second port ("remoting-vip") from the line that people read.
        where = " ".join(f"{name}={address}" for name, address in addresses.items() if "-" not in name)
        for name in addresses:
            if "-" in name:
                log.info("also listening: %s=%s", name, addresses[name])
        data = shlex.quote(str(config.data.resolve()))
        print(
            f"martlet ready: {where}{where and ' '}kernel={kernel_name()} data={data} in {process_age_s():.2f} s",
            flush=True,
        )
        notify_systemd(f"READY=1\nSTATUS=accepting on {where}", os.environ)

    async def work() -> bool:
        return await run(config, ready=ready, report=report)

    log.info(
        "martlet %s on Python %s; data %s, flush %s, plugins %s",
        installed_version(),
        sys.version.partition(" ")[0],
        config.data,
        config.store.flush,
        ", ".join(config.plugins.enabled) or "none",
    )
    if trio.run(work):
        log.info("stopped; all data is on disk")
    return Exit.OK


COMMAND = Subcommand("run", "run a broker", configure, start)
