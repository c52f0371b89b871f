"""The example clients of the README: each receives what the Python example sends."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.client.patient import command

from . import fetch
from .martlet_process import Martlet

pytestmark = pytest.mark.interop

EXAMPLES = Path(__file__).parents[2] / "examples" / "clients"
COUNT = 5
LIMIT_S = 300
TRIES = 4


def python_words() -> Sequence[str]:
    return command(EXAMPLES / "python" / "consume.py")


def java_words() -> Sequence[str]:
    jars = fetch.client_jars("5.5.0")
    return [fetch.tool("java"), "-cp", f"{jars}/*", str(EXAMPLES / "java" / "Consume.java")]


def go_words() -> Sequence[str]:
    sources = sorted((EXAMPLES / "go").iterdir())

    def build(target: Path) -> None:
        fetch.download([fetch.tool("go"), "build", "-o", str(target / "consume"), "."], folder=EXAMPLES / "go")

    return [str(fetch.product("go-example", sources, build) / "consume")]


def node_words() -> Sequence[str]:
    return fetch.node_program("node-example", EXAMPLES / "node" / "consume.js")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Martlet]:
    martlet = Martlet(tmp_path_factory.mktemp("examples"))
    yield martlet
    martlet.stop()


def run(words: Sequence[str], folder: Path) -> list[str]:
    """Return the lines of a program; one that gave up before it said anything is started again.

    Some clients wait 3 s for their first answer, which are over when a busy machine stands still for a moment.
    """
    for _ in range(TRIES):
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode == 0 or done.stdout:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "words", [python_words, java_words, go_words, node_words], ids=["python", "java", "go", "node"]
)
def test_it_receives_what_the_python_example_sent(
    words: Callable[[], Sequence[str]],
    broker: Martlet,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    topic = f"Example-{request.node.callspec.id}"
    where = [broker.name_server, topic, str(COUNT)]
    sent = run(command(EXAMPLES / "python" / "produce.py", *where), tmp_path)
    assert len(sent) == COUNT
    said = run([*words(), *where], tmp_path)
    received = [line for line in said if line.startswith("received: ")]
    assert sorted(received) == [f"received: message {number}" for number in range(COUNT)]
