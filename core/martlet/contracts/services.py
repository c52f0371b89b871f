"""Services, which run beside the protocols, and subcommands of the command line."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from msgspec import Struct

__all__ = ["Service", "Subcommand"]

# A coroutine function that runs while the broker does, until it is cancelled. If it has an argument `task_status`, the
# ports open only after it has called `task_status.started()`, as in `trio.Nursery.start`.
Service: TypeAlias = Callable[[], Awaitable[None]]


class Subcommand(Struct, frozen=True):
    """A ``martlet`` subcommand: *configure* fills its argparse parser, *run* gets the arguments.

    *run* returns the exit code.
    """

    name: str
    help: str
    configure: Callable[[Any], None]  # gets the argparse parser
    run: Callable[[Any], int]
