"""Services of plugins: started in order, and started again when they fail."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from inspect import signature
from typing import Final, cast, final

import trio

from martlet.contracts import Service
from martlet.errors import MartletError, PluginError

__all__ = ["RESTART_FIRST_S", "RESTART_MOST_S", "run_services"]

log = logging.getLogger("martlet")

RESTART_FIRST_S: Final = 1.0
RESTART_MOST_S: Final = 30.0


async def run_services(plugin: str, services: Sequence[tuple[Service, trio.Event]], scope: trio.CancelScope) -> None:
    with scope:
        async with trio.open_nursery() as nursery:
            for service, is_ready in services:
                nursery.start_soon(_keep_running, plugin, service, is_ready)
    for _, is_ready in services:
        is_ready.set()


@final
class _Status:
    """A trio.TaskStatus with which a service reports that it is ready."""

    def __init__(self, is_ready: trio.Event) -> None:
        self._is_ready = is_ready

    def started(self, value: object = None) -> None:
        self._is_ready.set()


def _reports_ready(service: Service) -> bool:
    """Whether *service* takes a ``task_status``; callables without a signature (written in C) do not."""
    try:
        return "task_status" in signature(service).parameters
    except ValueError:
        return False


async def _keep_running(plugin: str, service: Service, is_ready: trio.Event) -> None:
    """Run a plugin's service; if it fails, log the error and restart it after a pause that doubles each time.

    Raises:
      PluginError: the service failed before it was ready.
    """
    start: Callable[[], Awaitable[None]] = service
    if _reports_ready(service):
        start = partial(cast(Callable[..., Awaitable[None]], service), task_status=_Status(is_ready))
    else:
        is_ready.set()
    pause_s = RESTART_FIRST_S
    while True:
        try:
            await start()
            is_ready.set()
            return
        except Exception as error:
            if not is_ready.is_set():
                text = f"{type(error).__name__}: {error}"
                raise PluginError(f"service of plugin {plugin!r} failed before it was ready; {text}") from error
            expected = isinstance(error, MartletError)
            text = "service of plugin %r failed and restarts in %g s; %s"
            log.error(text, plugin, pause_s, error, exc_info=None if expected else error)
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, RESTART_MOST_S)
