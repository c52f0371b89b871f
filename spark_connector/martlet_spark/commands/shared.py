"""Shared parts of the pipelines' commands: arguments for topics and for Spark, and the session that runs a pipeline."""

import argparse
import json
import logging
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, current_thread, main_thread
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from martlet.cli.outcome import Exit, Unreachable, UsageError, complain
from martlet.cli.terminal import Bar
from martlet_remoting.commands.connecting import SECRET_VARIABLE, client_config
from martlet_remoting.commands.values import check_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from martlet_spark.pipelines.progress import Show, StreamReport

__all__ = [
    "Source",
    "add_spark",
    "add_tier",
    "add_topics",
    "as_command",
    "cluster_options",
    "in_spark",
    "look",
    "print_report",
    "reading_options",
    "run_query",
    "size",
    "source_of",
    "tasks_shown",
]

Source: TypeAlias = dict[str, str]
UNITS: Final = {"": 0, "k": 10, "m": 20, "g": 30}
LOOK_MS: Final = 3000  # timeout of the first look at the topics, before Spark starts
SPARK: Final = "Spark options"
# Names of the data source's options in its errors -> names of the commands' options.
NAMES: Final = {
    "the option endpoints": "--name-server",
    "the option tls": "--tls",
    "begin with tls": "begin with --tls",
    "tlsCa": "--tls-ca",
    "tlsCert": "--tls-cert",
    "tlsKey": "--tls-key",
    "tlsInsecure": "--tls-insecure",
    "accessKey": "--access-key",
    "secretKey": "--secret-file",
    "option tierUrl": "option --tier",
    "the tierUrl": "the tiered.url",
}
SOURCE_NAME: Final = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")


def add_topics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="*", help="topics to read")
    parser.add_argument("--pattern", metavar="REGEX", help="read the topics that match, also those created later")


def add_tier(parser: argparse.ArgumentParser) -> None:
    text = "read the table of a broker's cold tier (its tiered.url) instead of brokers, which may be stopped"
    parser.add_argument("--tier", metavar="URL", default="", help=text)


def add_spark(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(SPARK).add_argument
    add("--master", metavar="URL", default="", help="cluster to run on; default: Spark's configuration, else local[*]")
    add("--conf", metavar="KEY=VALUE", action="append", default=[], help="setting of Spark; can be repeated")


def size(option: str) -> Callable[[str], int]:
    """Return a parser for *option*, whose value is a number of bytes such as ``64m``."""

    def read(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,15})([kmg]?)b?", text.lower())
        if match is None or int(match[1]) == 0:
            raise UsageError(f"{option} {text!r} is not a size; give for example 512k, 64m or 1g")
        return int(match[1]) << UNITS[match[2]]

    return read


def source_of(arguments: Any) -> Source:
    """Return the source's options for the topics that *arguments* name, after a check that they can be read.

    Raises:
      UsageError: no topics are given, or both names and a pattern.
      ConfigError: a connection option is invalid.
      Unreachable: no name server answers.
      ReadError: a topic does not exist, or may not be read.
    """
    if bool(arguments.topic) == bool(arguments.pattern):
        raise UsageError("give topics or --pattern, one of them; see --help")
    chosen = {"subscribePattern": arguments.pattern} if arguments.pattern else {"subscribe": ",".join(arguments.topic)}
    options = {**reading_options(arguments), **chosen}
    look(options)
    return options


def reading_options(arguments: Any) -> Source:
    """Return the source's options for the connection, or for the cold tier that *arguments* name."""
    url = getattr(arguments, "tier", "")
    return {"tier": "cold", "tierUrl": url} if url else cluster_options(arguments)


def as_command(text: str) -> str:
    """Return the *text* of an error of the data source with the names of the commands' options."""
    return SOURCE_NAME.sub(lambda found: NAMES[found[0]], text)


def cluster_options(arguments: Any) -> Source:
    """Return the source's options for the connection."""
    check_text(arguments)
    config = client_config(arguments)
    found = {"endpoints": config.name_server, "timeoutMs": str(round(arguments.timeout * 1000))}
    found["tls"] = str(config.tls).lower()
    found["tlsInsecure"] = str(config.tls_insecure).lower()
    found |= {"tlsCa": config.tls_ca, "tlsCert": config.tls_cert, "tlsKey": config.tls_key}
    if config.access_key:
        found["accessKey"] = config.access_key
        found["secretKey"] = f"file:{config.secret_file}" if config.secret_file else f"env:{SECRET_VARIABLE}"
    return {name: value for name, value in found.items() if value}


def look(options: Source) -> None:
    """Fail before Spark starts, which takes some seconds, if the topics cannot be read."""
    from martlet_spark.cluster import Cluster
    from martlet_spark.connection import ConnectionBroken
    from martlet_spark.errors import ReadError
    from martlet_spark.options import SOURCE, parse
    from martlet_spark.read.seam import places_of
    from martlet_spark.read.tier_place import plain_errors
    from martlet_spark.read.topics import Subscribed

    parsed = parse(options, SOURCE)
    if parsed["tier"] == "cold":
        with plain_errors():
            for place in places_of(parsed):
                place.open()
        return
    timeout_s = min(parsed["timeoutMs"], LOOK_MS) / 1000
    try:
        Subscribed(Cluster(parsed["endpoints"], parsed.security, timeout_s), parsed).bounds()
    except (ConnectionBroken, ReadError) as error:
        if isinstance(error, ConnectionBroken) or isinstance(error.__cause__, ConnectionBroken):
            raise Unreachable(
                f"{as_command(str(error))}; start a broker, or give the address with --name-server"
            ) from error
        raise


@contextmanager
def in_spark(arguments: Any, name: str, label: str, unit: str) -> "Iterator[tuple[SparkSession, Show]]":
    """Open the Spark session that *arguments* describe; yield it with the function that updates a progress bar.

    Session and bar end with the block, but a session that was active before stays. Ctrl-C raises KeyboardInterrupt at
    the next update of the bar, not in the middle of a call of the JVM; a second Ctrl-C raises it at once.
    """
    from pyspark.sql import SparkSession

    from martlet_spark.pipelines.session import open_session

    # py4j logs each call that fails, and a call that is cut off fails.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    conf, was_active = _conf(arguments.conf), SparkSession.getActiveSession() is not None
    with _ctrl_c() as (check, take_again):
        session = open_session(f"martlet pipeline {name}", arguments.master, conf)
        take_again()
        shown = Bar(label, unit)

        def show(done: int, total: int) -> None:
            check()
            shown.update(done, total)

        try:
            check()
            yield session, show
        finally:
            shown.close()
            if not was_active:
                session.stop()


@contextmanager
def _ctrl_c() -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Record Ctrl-C while the block runs.

    Yields two functions: one raises KeyboardInterrupt if Ctrl-C was pressed, the other installs the signal handler
    again after Spark has replaced it.
    """
    pressed = Event()

    def note(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    def take() -> None:
        if current_thread() is main_thread():
            signal.signal(signal.SIGINT, note)

    before = signal.getsignal(signal.SIGINT)
    take()
    try:
        yield check, take
    finally:
        if current_thread() is main_thread():
            signal.signal(signal.SIGINT, before)


def run_query(what: str, arguments: Any, work: "Callable[[SparkSession, Show], StreamReport]", **bar: str) -> int:
    """Run *work* in Spark, print its report in a sentence that begins with *what*, and return the exit code."""
    from martlet_spark.pipelines.progress import Interrupted

    code = Exit.OK
    with in_spark(arguments, **bar) as (session, show):
        try:
            report = work(session, show)
        except Interrupted as interrupt:
            report, code = interrupt.report, Exit.INTERRUPTED
    print_report(what, report.fields(), as_json=arguments.json)
    if code == Exit.INTERRUPTED:
        complain("interrupted; what was completed stays, and the same command continues")
    return code


@contextmanager
def tasks_shown(session: "SparkSession", show: "Show", path: str = "") -> Iterator[None]:
    """Show the tasks of the block's jobs; Ctrl-C cancels the jobs, and prints what to do with the output at *path*."""
    from martlet_spark.pipelines.progress import show_tasks

    try:
        with show_tasks(session, show):
            yield
    except KeyboardInterrupt:
        left = f"{path!r} may be incomplete; remove it, and " if path else ""
        complain(f"interrupted; {left}start the command again")
        raise


def _conf(given: list[str]) -> Mapping[str, str]:
    for each in given:
        if not each.partition("=")[0] or "=" not in each:
            raise UsageError(f"--conf {each!r} is not KEY=VALUE; give for example spark.executor.memory=4g")
    return dict(each.split("=", 1) for each in given)


def print_report(what: str, fields: Mapping[str, object], *, as_json: bool) -> None:
    """Print *fields* as JSON, or as a sentence that begins with *what*."""
    if as_json:
        print(json.dumps(fields, indent=2))
    else:
        shown = ", ".join(f"{name.replace('_', ' ')} {_text(value)}" for name, value in fields.items())
        print(f"{what}: {shown}")


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
