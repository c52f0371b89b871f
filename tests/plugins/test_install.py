"""The example plugins as a stranger has them: distributions, installed into a clean environment and used."""

import os
import re
import selectors
import socket
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.interop import fetch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
READY_S = 180.0
# The examples that are built with the packages of this environment, and the one whose build needs are fetched.
PREBUILT = ("freeze", "latest", "feed", "line", "topics", "users")
FETCHED = "stamp"
# `.ci/run` runs these tests once, with the wheel that it has built.
installs = pytest.mark.full


def test_the_page_shows_the_whole_stamp_plugin() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    assert (EXAMPLES / "martlet-stamp" / "martlet_stamp" / "__init__.py").read_text() in page
    assert (EXAMPLES / "martlet-stamp" / "pyproject.toml").read_text() in page


def test_all_code_on_the_page_is_from_the_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text(), re.DOTALL)
    sources = [path.read_text() for path in EXAMPLES.rglob("*.py")]
    assert len(blocks) > 4
    assert [block for block in blocks if not any(block in source for source in sources)] == []


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with Martlet and the examples in it."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=False)
    interpreter = folder / "venv" / "bin" / "python"
    # The wheel that is under test where one is, else what this checkout would build.
    martlet = os.environ.get("MARTLET_WHEEL") or str(ROOT)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # An environment of its own for each build takes longer than all else; FETCHED shows that its build needs suffice.
    built = [martlet, *(str(EXAMPLES / f"martlet-{name}") for name in PREBUILT)]
    fetch.download([*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), *built], folder)
    wheels = [str(wheel) for wheel in sorted(folder.glob("*.whl"))]
    assert len(wheels) == len(built)
    fetched = str(EXAMPLES / f"martlet-{FETCHED}")
    fetch.download([*pip, "--python", str(interpreter), "install", *wheels, fetched], folder)
    return interpreter


def test_the_examples_need_the_same_to_be_built() -> None:
    projects = [tomllib.loads(each.read_text()) for each in sorted(EXAMPLES.glob("martlet-*/pyproject.toml"))]
    assert len(projects) == len(PREBUILT) + 1
    assert all(project["build-system"] == projects[0]["build-system"] for project in projects)


@contextmanager
def broker(python: Path, directory: Path, *settings: str, port: str = "line") -> Iterator[tuple[str, int]]:
    """Run ``martlet run`` there; the address of *port*."""
    command = [str(python.parent / "martlet"), "run", "--data", str(directory / "data")]
    ports = ("line.listen=127.0.0.1:0", "feed.listen=127.0.0.1:0", "topics.listen=127.0.0.1:0")
    for setting in ('plugins.enabled=["stamp", "freeze", "latest", "line", "feed", "topics"]', *ports, *settings):
        command += ["--set", setting]
    with (directory / "log").open("a") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield ready(process, directory / "log", port)
        finally:
            process.terminate()
            assert process.wait(180) == 0
            assert process.stdout is not None
            process.stdout.close()


def ready(process: "subprocess.Popen[str]", log: Path, port: str) -> tuple[str, int]:
    """Wait for the ready line and return the address of *port* in it."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(READY_S), log.read_text()
    line = process.stdout.readline()
    found = re.search(rf"\b{port}=([\d.]+):(\d+)", line)
    assert found, (line, log.read_text())
    return found[1], int(found[2])


def talk(address: tuple[str, int], *lines: str) -> list[str]:
    """Say *lines* and QUIT; return what the broker said before BYE."""
    with socket.create_connection(address, timeout=180) as connected, connected.makefile("rb") as answers:
        connected.sendall("".join(f"{line}\n" for line in (*lines, "QUIT")).encode())
        said = [line.decode().rstrip("\n") for line in answers]
    assert said.pop() == "BYE"
    return said


@installs
def test_the_examples_work_in_a_clean_environment(python: Path, tmp_path: Path) -> None:
    listed = subprocess.run([str(python.parent / "martlet"), "plugins"], check=True, capture_output=True, text=True)
    for name in ("stamp", "freeze", "latest", "feed", "line", "topics", "remoting", "nameserver"):
        assert re.search(rf"\b{name}\b", listed.stdout), listed.stdout
    settings = ("broker.name=north", "stamp.name=VIA", 'freeze.topics=["old"]')
    with broker(python, tmp_path, *settings) as address:
        assert talk(address, "PUB news colour=red hello") == ["OK 0 0"]
        assert talk(address, "PUB old x") == ["ERR NO_PERMISSION '' may not publish to topic[old]"]
        assert durable(address, "ACK 1 0 0") == ["MSG 0 0 5 colour=red VIA=north", "hello"]
        assert talk(address, "PUB news size=9 again") == ["OK 0 1"]
    with broker(python, tmp_path, *settings) as address:
        # After a restart the durable name goes on behind what it acknowledged.
        assert durable(address) == ["MSG 0 1 5 size=9 VIA=north", "again"]
        assert shared(address) == ["MSG 0 1 5 size=9 VIA=north", "again"]


@installs
def test_the_feed_works_in_a_clean_environment(python: Path, tmp_path: Path) -> None:
    with broker(python, tmp_path) as address:
        assert talk(address, "PUB news first", "PUB news second") == ["OK 0 0", "OK 0 1"]
    with (
        broker(python, tmp_path, "feed.credit=1", port="feed") as address,
        socket.create_connection(address, timeout=180) as connected,
        connected.makefile("rb") as feed,
    ):
        connected.sendall(b"FEED news\n")
        assert (feed.readline(), feed.read(5)) == (b"5\n", b"first")
        connected.sendall(b"MORE 1\n")
        assert (feed.readline(), feed.read(6)) == (b"6\n", b"second")


@installs
def test_the_topics_work_in_a_clean_environment(python: Path, tmp_path: Path) -> None:
    def say(address: tuple[str, int], said: bytes, expected: bytes) -> None:
        with socket.create_connection(address, timeout=180) as connected, connected.makefile("rb") as answers:
            connected.sendall(said)
            assert answers.read(len(expected)) == expected

    message = b"RUN 1 1 16\nsite/door 3\nout\n"
    with broker(python, tmp_path, port="topics") as address:
        say(address, b"HELLO me\nSUB site/# 1\nQUIT\n", b"OK new\nOK\nBYE\n")
        say(address, b"HELLO\n" + message, b"OK new\nACK 1 1\n")
    with broker(python, tmp_path, port="topics") as address:
        say(address, b"HELLO me\n", b"OK old\n" + message)


def durable(address: tuple[str, int], *then: str) -> list[str]:
    """Subscribe as NAME, take the first message, say *then* and leave."""
    return take(address, "SUB news as NAME from earliest", *then)


def shared(address: tuple[str, int]) -> list[str]:
    """The same as a member of a group that wants one kind of messages only."""
    return take(address, "SUB news group G from earliest where PROPERTIES size=9", "ACK 1 0 1")


def take(address: tuple[str, int], subscribe: str, *then: str) -> list[str]:
    with socket.create_connection(address, timeout=180) as connected, connected.makefile("rb") as answers:
        connected.sendall(f"{subscribe}\n".encode())
        assert answers.readline() == b"OK 1\n"
        assert answers.readline().startswith(b"BATCH 1 1 ")
        message = [answers.readline().decode().rstrip("\n") for _ in range(2)]
        connected.sendall("".join(f"{line}\n" for line in (*then, "PING")).encode())
        assert answers.readline() == b"PONG\n"
    return message
