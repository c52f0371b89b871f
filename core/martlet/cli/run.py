"""``martlet run``: a whole broker in this process."""

import argparse
import logging
import os
import platform
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from martlet import logs
from martlet.cli.outcome import Exit
from martlet.cli.terminal import Bar
from martlet.clock import process_age_s
from martlet.config import override, read_toml
from martlet.contracts import Command
from martlet.old_objects import OldObjects

if TYPE_CHECKING:
    from martlet.run import Config

__all__ = ["COMMAND", "configure", "read", "serve"]

log = logging.getLogger("martlet")

EXTEND_US: Final = 60_000_000
# Parameters of mallopt(3), glibc: larger blocks are mapped and unmapped one by one, and no more stays free at the end
# of the heap. By default both grow with the largest block ever freed: one frame of 16 MiB would leave 32 MiB there.
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
KEPT_FREE_BYTES: Final = 4 << 20

EPILOG = """\
examples:
  martlet run                                        a broker on loopback, data in ./martlet-data
  martlet run --config martlet.toml                  as the file says; `martlet config` prints one with every key
  martlet run --data /var/lib/martlet --log json     data elsewhere, log for machines
  martlet run --set store.flush=async --set remoting.listen=0.0.0.0:10911 --set broker.advertise=mq.example.org

Once it accepts connections it prints one line:
  martlet ready: remoting=127.0.0.1:10911 nameserver=127.0.0.1:9876 data=/home/me/martlet-data in 0.21 s
SIGTERM and Ctrl-C end it in order, with exit code 0; SIGHUP reads certificates again.
Exit codes: 0 stopped in order; 1 a failure; 2 command line or configuration; 3 data in use elsewhere, or failed.
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
        "--data", metavar="DIR", help="keep everything in this directory; short for --set broker.data=DIR"
    )
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="set one key, over what the file says; may be given often",
    )
    parser.add_argument("--log", choices=("text", "json"), help="the log's form on stderr; short for --set log.format=")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="the least to log; short for --set log.level=",
    )


def read(arguments: argparse.Namespace) -> "Config":
    """Return the configuration that the command line asks for. Raises `ConfigError`."""
    from martlet.run import read_config

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
    """Run what *config* says until a signal comes."""
    import trio

    from martlet.cli.version import installed_version
    from martlet.run import notify_systemd, run

    logs.configure(config.log)
    os.umask(0o077)  # messages are nobody else's to read
    bar = Bar("recovering", "B")

    def report(done: int, total: int, records: int) -> None:
        bar.update(done, total, f"{records:,} records")
        # Recovery may take longer than systemd would wait otherwise; it is told that we are still at it.
        notify_systemd(f"EXTEND_TIMEOUT_USEC={EXTEND_US}\nSTATUS=recovering, {records:,} records read", os.environ)

    def ready(addresses: dict[str, str]) -> None:
        bar.close()
        old = OldObjects()
        old.start()
        trio.lowlevel.spawn_system_task(old.run)
        _return_freed_memory()
        # A protocol's second port ("remoting-vip") is no news for those who read the line.
        where = " ".join(f"{name}={address}" for name, address in addresses.items() if "-" not in name)
        for name in addresses:
            if "-" in name:
                log.info("listening as well: %s=%s", name, addresses[name])
        data = shlex.quote(str(config.data.resolve()))
        print(f"martlet ready: {where}{where and ' '}data={data} in {process_age_s():.2f} s", flush=True)
        notify_systemd(f"READY=1\nSTATUS=accepting on {where}", os.environ)

    async def work() -> bool:
        return await run(config, ready=ready, report=report)

    log.info(
        "martlet %s on Python %s; data %s, flush %s, plugins %s",
        installed_version(),
        platform.python_version(),
        config.data,
        config.store.flush,
        ", ".join(config.plugins.enabled) or "none",
    )
    if trio.run(work):
        log.info("stopped; everything is on the disk")
    return Exit.OK


def _return_freed_memory() -> None:
    """Let glibc give back to the kernel what large requests took; other allocators do as they do."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_FREE_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE_BYTES)


COMMAND = Command("run", "run a broker", configure, start)
