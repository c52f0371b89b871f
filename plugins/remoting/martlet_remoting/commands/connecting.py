"""Connection settings of commands, and reports of their failures.

Every command that talks to a broker has the same connection options. An option overrides the
environment, which overrides the section ``[client]`` of the configuration file. The environment
can set the name server, TLS and the user. A secret comes from a file or from the environment,
never from an option, because every user of the machine can read the command line.
"""

import argparse
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import trio

from martlet.cli.outcome import Unreachable
from martlet.config import fill, read_secret, read_toml
from martlet.errors import ConfigError
from martlet.net.tls import client_context
from martlet.settings import ClientConfig
from martlet_client import (
    BrokerError,
    ClientError,
    ClientSettings,
    ConnectionLost,
    NameServerUnreachable,
    RequestTimeout,
    SendFailed,
    SigningKey,
)
from martlet_remoting.commands.values import check_text, seconds
from martlet_remoting.wire.codes import ResponseCode

__all__ = [
    "CONNECTION",
    "SECRET_VARIABLE",
    "TIMEOUT_S",
    "Work",
    "add_connection",
    "client_config",
    "client_settings",
    "talking",
]

CONNECTION: Final = "connection options"
CONFIG_VARIABLE: Final = "MARTLET_CONFIG"
# RocketMQ's own clients and tools read NAMESRV_ADDR too.
VARIABLES: Final = {
    "name_server": "NAMESRV_ADDR",
    "tls": "MARTLET_TLS",
    "tls_ca": "MARTLET_TLS_CA",
    "tls_cert": "MARTLET_TLS_CERT",
    "tls_key": "MARTLET_TLS_KEY",
    "tls_insecure": "MARTLET_TLS_INSECURE",
    "access_key": "MARTLET_ACCESS_KEY",
    "secret_file": "MARTLET_SECRET_FILE",
}
SECRET_VARIABLE: Final = "MARTLET_SECRET"
SWITCHES: Final = ("tls", "tls_insecure")
IMPLY_TLS: Final = ("tls_ca", "tls_cert", "tls_key", "tls_insecure")
ON: Final = ("1", "true", "yes", "on")
OFF: Final = ("0", "false", "no", "off")

# The timeout is long, as the user can press Ctrl-C: a short pause of a machine must not cause a failure or resend.
TIMEOUT_S: Final = 30.0

Work: TypeAlias = Callable[[Any], Awaitable[int]]


def add_connection(parser: argparse.ArgumentParser, timeout_s: float = TIMEOUT_S) -> None:
    """Add the connection options to *parser*."""
    add = parser.add_argument_group(CONNECTION).add_argument
    add(
        "-n",
        "--name-server",
        metavar="HOST:PORT",
        help="name server, or several separated by ;. Default: $NAMESRV_ADDR, else 127.0.0.1:9876",
    )
    add(
        "--timeout",
        type=seconds("--timeout"),
        metavar="SECONDS",
        default=timeout_s,
        help="time limit of each request; default 30, for ping 3",
    )
    add(
        "--tls",
        action=argparse.BooleanOptionalAction,
        help="encrypt all connections; implied by the other TLS options. Default: $MARTLET_TLS, else no",
    )
    add(
        "--tls-ca",
        metavar="FILE",
        help="trusted certificate authorities (PEM). Default: $MARTLET_TLS_CA, else the system's",
    )
    add("--tls-cert", metavar="FILE", help="client certificate (PEM). Default: $MARTLET_TLS_CERT")
    add(
        "--tls-key",
        metavar="FILE",
        help="private key of the client certificate (PEM). Default: $MARTLET_TLS_KEY, else in the same file",
    )
    add(
        "--tls-insecure",
        action="store_true",
        default=None,
        help="accept any server certificate. Default: $MARTLET_TLS_INSECURE",
    )
    add("--access-key", metavar="NAME", help="sign requests as this user. Default: $MARTLET_ACCESS_KEY, else unsigned")
    add(
        "--secret-file",
        metavar="FILE",
        help="file with the user's secret. Default: $MARTLET_SECRET_FILE, else the secret itself is $MARTLET_SECRET",
    )
    add(
        "--config",
        metavar="FILE",
        help="read defaults from [client] in this TOML file. Default: $MARTLET_CONFIG, else none",
    )


def client_config(arguments: Any) -> ClientConfig:
    """Return the configuration: each value from the options, else from the environment, else from the file.

    Raises:
      ConfigError: a value is invalid.
    """
    values: dict[str, object] = {}
    for level in (_from_file(getattr(arguments, "config", None)), _from_environment(), _from_options(arguments)):
        if "tls" not in level and any(level.get(name) for name in IMPLY_TLS):
            values["tls"] = True
        values |= level
    return fill(ClientConfig, values, "client")


def client_settings(arguments: Any) -> ClientSettings:
    """Return the settings of a client, made of `client_config`.

    Raises:
      ConfigError: a value is invalid.
    """
    config = client_config(arguments)
    tls = None
    if config.tls:
        tls = client_context(config.tls_ca, config.tls_cert, config.tls_key, verify=not config.tls_insecure)
    timeout_s = getattr(arguments, "timeout", TIMEOUT_S)
    settings = ClientSettings(
        config.name_server,
        request_timeout_s=timeout_s,
        connect_timeout_s=timeout_s,
        tls=tls,
        signing_key=_signing_key(config),
    )
    try:
        settings.name_servers()
    except ValueError as error:
        raise ConfigError(f"name server {str(error).removeprefix('address ').removeprefix('name server ')}") from error
    return settings


def _signing_key(config: ClientConfig) -> SigningKey | None:
    if not config.access_key:
        if config.secret_file:
            raise ConfigError(f"secret file {config.secret_file!r} has no access key; set client.access_key as well")
        return None
    secret = read_secret(config.secret_file) if config.secret_file else os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        text = f"access key {config.access_key!r} has no secret"
        raise ConfigError(f"{text}; set client.secret_file, or ${SECRET_VARIABLE}")
    try:
        return SigningKey(config.access_key, secret)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _from_file(given: str | None) -> dict[str, object]:
    path = given or os.environ.get(CONFIG_VARIABLE)
    table = read_toml(Path(path)).get("client", {}) if path else {}
    if not isinstance(table, dict):
        raise ConfigError("config key 'client' is a value; it must be a section")
    fill(ClientConfig, table, "client")  # an overridden value must be valid too
    return table


def _from_environment() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, variable in VARIABLES.items():
        text = os.environ.get(variable)
        if text:
            found[name] = _on_off(variable, text) if name in SWITCHES else text
    return found


def _on_off(variable: str, text: str) -> bool:
    if text.lower() not in ON + OFF:
        raise ConfigError(f"environment variable {variable} is {text!r}; it must be 1 or 0")
    return text.lower() in ON


def _from_options(arguments: Any) -> dict[str, object]:
    given = {name: getattr(arguments, name, None) for name in VARIABLES}
    return {name: value for name, value in given.items() if value is not None}


def talking(work: Work | None = None) -> Callable[[Any], int]:
    """Return the `run` of a `Command`: it runs *work*, or the chosen subcommand's work, in trio.

    *work* gets the `ClientSettings` as ``arguments.settings``.
    """

    def run(arguments: Any) -> int:
        # The error is reported at the end; without a handler, logging would also print the client's warning.
        logging.getLogger("martlet_client").addHandler(logging.NullHandler())
        check_text(arguments)
        arguments.settings = client_settings(arguments)
        chosen_work: Work = work or arguments.work
        try:
            return trio.run(_run_until_interrupted, chosen_work, arguments)
        except ClientError as error:
            raise _explained_error(error, arguments.settings) from error
        except BaseExceptionGroup as group:
            raise BaseExceptionGroup(
                "failed", [_explained_error(error, arguments.settings) for error in _leaves(group)]
            ) from group

    return run


def _explained_error(error: BaseException, settings: ClientSettings) -> BaseException:
    """Return the error to report to the user for *error*."""
    text = str(error)
    hint = "start a broker with `martlet run`, or give the address with --name-server"
    if isinstance(error, NameServerUnreachable):
        return Unreachable(f"{text}; {hint}")
    if (
        isinstance(error, BrokerError)
        and error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        and error.address in settings.name_servers()
    ):
        return Unreachable(f"server {error.address!r} is not a name server, perhaps a broker; {hint}")
    if _is_unreachable(error):
        return Unreachable(text)
    return error


def _is_unreachable(error: BaseException) -> bool:
    if isinstance(error, SendFailed):
        return all(_is_unreachable(attempt.error) for attempt in error.attempts)
    return isinstance(error, NameServerUnreachable | ConnectionLost | RequestTimeout)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def _run_until_interrupted(work: Work, arguments: Any) -> int:
    """Run *work*; the first Ctrl-C cancels it, the second interrupts it immediately.

    Raises:
      KeyboardInterrupt: *work* was interrupted; in an exception group if *work* failed while it was cancelled.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    if previous_handler == signal.SIG_IGN:
        return await work(arguments)  # a background job of a script, which ignores the script's Ctrl-C
    token = trio.lowlevel.current_trio_token()
    scope = trio.CancelScope()

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, previous_handler)
        token.run_sync_soon(scope.cancel)

    signal.signal(signal.SIGINT, interrupt)
    try:
        with scope:
            return await work(arguments)
    except Exception as error:  # the scope has removed its own Cancelled from an exception group
        if scope.cancel_called:
            raise BaseExceptionGroup("interrupted", [KeyboardInterrupt(), error]) from None
        raise
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    raise KeyboardInterrupt
