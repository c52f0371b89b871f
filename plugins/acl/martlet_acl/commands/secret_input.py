"""Passwords and secrets from the terminal, a file or stdin; never from the command line, which others can see."""

import argparse
import sys
from base64 import b32encode
from getpass import getpass
from typing import Any, Final

from martlet.cli.outcome import UsageError
from martlet.config import read_secret
from martlet.runtime.ids import Ids

__all__ = ["add_password_file", "make_password", "make_secret", "read_from", "read_password"]

STDIN: Final = "-"
# 120 and 160 random bits.
PASSWORD_CHARACTERS: Final = 24
SECRET_CHARACTERS: Final = 40


def add_password_file(parser: Any) -> None:
    """Add the option ``--password-file``."""
    parser.add_argument(
        "--password-file", metavar="FILE", help="read the password from this file, or from stdin if it is -"
    )


def read_from(path: str) -> str:
    """Return the secret in the file *path*, or the first line of stdin. Raises `ConfigError` or `UsageError`."""
    if path != STDIN:
        return read_secret(path)
    secret = sys.stdin.readline().rstrip("\r\n")
    if not secret:
        raise UsageError("stdin has no first line; write the secret there")
    return secret


def read_password(arguments: argparse.Namespace, name: str) -> str:
    """Return the password that the user gives.

    Raises:
      UsageError: there is no terminal to ask at, or both inputs differ.
    """
    if arguments.password_file:
        return read_from(arguments.password_file)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        text = "add --password-file FILE, with - for stdin, or --no-password"
        raise UsageError(f"no terminal to ask for the password of {name!r}; {text}")
    password = getpass(f"Password of {name}: ", sys.stderr)
    if getpass("Again: ", sys.stderr) != password:
        raise UsageError("the passwords differ; nothing was changed")
    if not password:
        raise UsageError("the password is empty; for a user without one add --no-password")
    return password


def make_password() -> str:
    """Return a password that nobody can guess."""
    return b32encode(Ids().key())[:PASSWORD_CHARACTERS].decode().lower()


def make_secret() -> str:
    """Return a secret for an access key."""
    return Ids().key().hex()[:SECRET_CHARACTERS]
