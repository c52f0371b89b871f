"""Spring Boot's `enableStompBrokerRelay` against Martlet: two instances of a web application, one of which is killed,
and a broker that is killed, with a personal queue for each session.

``MARTLET_RELAY_SESSIONS`` says how many sessions there are (default: 60). With 1,500 the test takes several minutes.
"""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlencode

import pytest
import trio

from . import fetch
from .martlet_process import Martlet
from .process import Process, eventually, free_port
from .relayed_browsers import Browser

T = TypeVar("T")

SESSIONS: Final = int(os.environ.get("MARTLET_RELAY_SESSIONS", "60"))
AT_ONCE: Final = 50  # sessions that connect at the same time
EXPIRY_S: Final = 5


class Application:
    """One instance of the web application."""

    def __init__(self, folder: Path, name: str, broker_port: int) -> None:
        self.port = free_port()
        words = [fetch.tool("java"), "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        words += ["-cp", fetch.spring_application(), "interop.RelayApplication", f"--broker.port={broker_port}"]
        words += [f"--server.port={self.port}", "--server.address=127.0.0.1", "--spring.main.banner-mode=off"]
        words += ["--server.tomcat.max-connections=4000", "--spring.main.lazy-initialization=true"]
        self.process = Process(words, folder / f"{name}.log")

    def wait_ready(self) -> None:
        """Wait until it has a connection to the broker."""
        self.process.wait_until(lambda: True if self._users() >= 0 else None, "the web application")

    def _users(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/users", timeout=60) as answer:
                return int(answer.read())
        except OSError:
            return -1

    def post(self, path: str, **parameters: str) -> None:
        """Have the application send something."""
        url = f"http://127.0.0.1:{self.port}/{path}?{urlencode(parameters)}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=180):
            pass


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Martlet]:
    settings = {"stomp.listen": f"127.0.0.1:{free_port()}", "stomp.queue_expiry_s": str(EXPIRY_S)}
    martlet = Martlet(tmp_path / "martlet", settings)
    yield martlet
    martlet.close()


@pytest.fixture
def applications(tmp_path: Path, broker: Martlet) -> Iterator[list[Application]]:
    port = int(broker.stomp.rpartition(":")[2])
    found = [Application(tmp_path, name, port) for name in ("one", "two")]
    yield found
    for each in found:
        each.process.kill()


def personal_queues(broker: Martlet) -> int:
    """Return how many personal queues the command lists."""
    words = [sys.executable, "-m", "martlet", "stomp", "queues", "--json", "--address", broker.stomp]
    rows = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=180).stdout)
    return sum(row["destination"].startswith("/queue/notify-user") for row in rows)


async def wait_queues(broker: Martlet, count: int) -> None:
    def look() -> bool | None:
        return True if personal_queues(broker) == count else None

    await trio.to_thread.run_sync(eventually, look)


async def in_thread(work: Callable[..., object], *args: object) -> None:
    await trio.to_thread.run_sync(work, *args)


async def connect(nursery: trio.Nursery, sessions: list[tuple[Application, str]]) -> list[Browser]:
    """Return a session for each user at an instance."""
    found: list[Browser] = []
    room = trio.CapacityLimiter(AT_ONCE)

    async def open_one(application: Application, user: str) -> None:
        async with room:
            found.append(await Browser.open(nursery, application.port, user))

    async with trio.open_nursery() as opening:
        for application, user in sessions:
            opening.start_soon(open_one, application, user)
    return found


async def test_sessions_of_two_instances_survive_kills_of_one_and_of_the_broker(
    broker: Martlet, applications: list[Application]
) -> None:
    one, two = applications
    for application in applications:
        await in_thread(application.wait_ready)
    async with trio.open_nursery() as nursery:
        browsers = await connect(nursery, [(applications[n % 2], f"user{n}") for n in range(SESSIONS)])
        await in_thread(lambda: one.post("all", text="hello"))
        for browser in browsers:
            await browser.wait_body("hello")
            await in_thread(lambda user=browser.user: one.post("user", name=user, text=f"only {user}"))
        for browser in browsers:
            await browser.wait_body(f"only {browser.user}")
            assert browser.bodies == ["hello", f"only {browser.user}"]
        await wait_queues(broker, SESSIONS)

        two.process.kill()
        moved = [browser for browser in browsers if int(browser.user.removeprefix("user")) % 2]
        for browser in moved:
            await browser.wait_ended()
        await wait_queues(broker, SESSIONS - len(moved))
        back = await connect(nursery, [(one, browser.user) for browser in moved])
        await in_thread(lambda: one.post("user", name=back[0].user, text="welcome"))
        await back[0].wait_body("welcome")

        await in_thread(broker.kill)
        browsers = [browser for browser in browsers if browser not in moved] + back
        for browser in browsers:
            await browser.wait_ended()
        await in_thread(broker.start)
        await in_thread(one.wait_ready)
        browsers = await connect(nursery, [(one, browser.user) for browser in browsers])
        await in_thread(lambda: one.post("all", text="again"))
        for browser in browsers:
            await browser.wait_body("again")
        await wait_queues(broker, SESSIONS)  # and no others: those of the sessions before are forgotten
        for browser in browsers:
            browser.close()
        await wait_queues(broker, 0)
