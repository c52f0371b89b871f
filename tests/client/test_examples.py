"""The client's examples do what they say, against a Martlet broker as a user starts it."""

import runpy
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.broker_process import broker_process

import martlet_client
from martlet_client import aio, blocking

from .patient import command

EXAMPLES = Path(__file__).parents[2] / "examples"
DOC = Path(__file__).parents[2] / "docs" / "client.md"


@pytest.fixture(scope="module")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with broker_process(tmp_path_factory.mktemp("data") / "store") as address:
        yield address


def run(name: str, name_server: str) -> list[str]:
    done = subprocess.run(
        command(EXAMPLES / name, name_server), capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_first_lines_of_the_page_send_and_receive(name_server: str) -> None:
    assert sorted(run("client_first.py", name_server)) == [f"hello {number}" for number in range(3)]
    code = (EXAMPLES / "client_first.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```\n" in DOC.read_text()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9876", "127.0.0.1", "", "127.0.0.1:98765"])
def test_a_malformed_address_is_told_in_one_sentence(address: str) -> None:
    done = subprocess.run(command(EXAMPLES / "client_first.py", address), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f" {address!r} " in done.stderr


@pytest.mark.parametrize("module", [martlet_client, aio, blocking])
def test_a_malformed_address_is_an_error_of_the_client_and_a_value_error(module: ModuleType) -> None:
    makes: list[Callable[[], object]] = [
        lambda: module.Producer("names", "g"),
        lambda: module.PushConsumer("names", "g", print, {"T": "*"}),
        lambda: module.PullConsumer("names", "g"),
        lambda: module.Admin("names"),
    ]
    for make in makes:
        with pytest.raises(martlet_client.BadAddress, match="write HOST:PORT") as caught:
            make()
        assert isinstance(caught.value, martlet_client.ClientError)
        assert isinstance(caught.value, ValueError)


def test_producer_and_consumer_meet(name_server: str) -> None:
    sent = run("client_producer.py", name_server)
    assert len(sent) == 2
    assert sent[1].startswith("stored 3 messages in queue ")
    received = run("client_consumer.py", name_server)
    assert sorted(line.partition(" (")[0] for line in received) == sorted(
        [f"created: order {number} created" for number in (1, 2, 3, 4)]
        + [f"{step}: order 1 {step}" for step in ("paid", "packed", "shipped")]
    )
    in_order = [line.split(":")[0] for line in received if "order 1" in line and "created" not in line]
    assert sorted(in_order) == ["packed", "paid", "shipped"]


def test_timed_messages_arrive_and_are_recalled(name_server: str) -> None:
    assert run("client_timed.py", name_server) == ["recalled coffee", "received tea", "received biscuits"]


def test_requests_get_their_replies(name_server: str) -> None:
    assert run("client_request_reply.py", name_server) == ["apple: 0.45", "pear: 0.60", "plum: unknown"]


def test_only_a_committed_message_is_received(name_server: str) -> None:
    lines = run("client_transactions.py", name_server)
    assert lines == ["empty: rollback", "full: commit", "received payment from full"]


def test_popped_jobs_are_done_once_and_retried(name_server: str) -> None:
    lines = run("client_pop.py", name_server)
    assert sorted(lines) == [
        "mail: done after 0 failures",
        "print: done after 1 failures",
        "print: the printer is busy, again in a second",
        "resize: done after 0 failures",
    ]


def test_asyncio_sends_and_consumes(name_server: str) -> None:
    assert sorted(run("client_asyncio.py", name_server)) == [f"hello {number}" for number in range(5)]


def test_only_matching_messages_are_received(name_server: str) -> None:
    lines = run("client_filter.py", name_server)
    assert sorted(lines[:-1]) == ["sale 0: a book", "sale 1: a piano"]
    assert lines[-1].startswith("refused: ")
    assert "'price >=' is invalid at character 9, its end: expected a value" in lines[-1]


def test_plain_code_reads_and_asks(name_server: str) -> None:
    lines = run("client_blocking.py", name_server)
    assert sorted(line.partition(": ")[2] for line in lines if ": " in line) == ["19 C", "21 C", "23 C"]
    assert min(line for line in lines if "holds" in line).startswith("queue 0 holds ")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("client_*.py")), ids=lambda path: path.name)
def test_every_example_is_in_the_documentation(path: Path) -> None:
    assert f"examples/{path.name}" in DOC.read_text()
    assert runpy.run_path(str(path))["__doc__"]
