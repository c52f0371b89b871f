"""The commands that talk to a broker, against one that runs."""

import io
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.client import patient

from martlet_remoting.client import Admin, PullConsumer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def to(martlet: Run, broker: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command against the broker of this module, found as RocketMQ's own tools find it."""
    monkeypatch.setenv("NAMESRV_ADDR", broker)
    return martlet


def from_json(answer: tuple[int, str, str]) -> Any:
    code, out, err = answer
    assert (code, err) == (0, "")
    return json.loads(out)


def many_from_json(text: str) -> list[Any]:
    """The objects that stand behind each other in *text*."""
    found = []
    decoder = json.JSONDecoder()
    at = 0
    while at < len(text.rstrip()):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
        at += 1
    return found


def commit(broker: str, group: str, topic: str, offset: int) -> None:
    """Let *group* have consumed below *offset* in every queue of *topic*."""

    async def work() -> None:
        async with Admin(broker) as admin:
            await admin.create_group(group)
        async with PullConsumer(broker, group) as consumer:
            for queue in await consumer.queues(topic):
                await consumer.commit(queue, offset)

    trio.run(work)


def test_a_topic_lives_from_create_to_delete(to: Run) -> None:
    assert to("topic", "create", "Born", "--queues", "3", "--perm", "r") == (
        0,
        "topic Born has 3 queues on martlet\n",
        "",
    )
    listed = {row["topic"]: row for row in from_json(to("topic", "list", "--json"))}
    assert listed["Born"] == {"topic": "Born", "brokers": 1, "queues": 3, "perm": "r"}
    assert "TBW102" not in listed
    assert to("topic", "delete", "Born", "--yes") == (0, "topic Born is deleted\n", "")
    assert "Born" not in {row["topic"] for row in from_json(to("topic", "list", "--json"))}


def test_the_systems_topics_are_shown_on_demand(to: Run) -> None:
    assert "TBW102" in {row["topic"] for row in from_json(to("topic", "list", "--all", "--json"))}


def test_a_topic_is_not_deleted_without_a_yes(to: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    to("topic", "create", "Kept")
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    code, _, err = to("topic", "delete", "Kept")
    assert code == 1
    assert "nothing was deleted" in err
    assert "Kept" in to("topic", "list")[1]


def test_what_is_sent_is_counted_shown_and_found(to: Run) -> None:
    to("topic", "create", "Orders", "--queues", "2")
    sent = from_json(
        to("send", "Orders", "one book", "--tag", "books", "--key", "4711", "--property", "colour=red", "--json")
    )
    assert sent["status"] == "OK"

    stats = from_json(to("topic", "stats", "Orders", "--json"))
    assert sum(row["messages"] for row in stats) == 1

    code, out, err = to("tail", "Orders", "--from", "begin", "--no-follow")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:.]+ [01]/0 \[books\] one book\n", out)

    for words in (("message", sent["offset_id"]), ("message", "--key", "4711", "--topic", "Orders")):
        (found,) = from_json(to(*words, "--json"))
        assert found["body"] == "one book"
        assert found["tag"] == "books"
        assert found["properties"]["colour"] == "red"
    assert "body          one book" in to("message", sent["id"], "--topic", "Orders")[1]


def test_every_line_of_stdin_is_a_message(to: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"line {number}\n" for number in range(100))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert to("send", "Lines") == (0, "100 messages stored\n", "")
    shown = many_from_json(to("tail", "Lines", "--from", "begin", "--no-follow", "--json")[1])
    assert sorted(message["body"] for message in shown) == sorted(lines.splitlines())


def test_tail_ends_after_the_count_and_selects_by_tag(to: Run) -> None:
    to("topic", "create", "Tagged", "--queues", "1")
    for number in range(6):
        to("send", "Tagged", f"message {number}", "--tag", "odd" if number % 2 else "even")
    shown = many_from_json(to("tail", "Tagged", "--from", "begin", "--tag", "odd", "--count", "2", "--json")[1])
    assert [message["body"] for message in shown] == ["message 1", "message 3"]


def test_tail_begins_at_a_time(to: Run) -> None:
    to("send", "Timed", "old enough")
    assert "old enough" in to("tail", "Timed", "--from", "1h", "--no-follow")[1]
    assert to("tail", "Timed", "--from", "2099-01-01", "--no-follow")[1] == ""


def test_a_group_shows_its_lag_and_is_reset(to: Run, broker: str) -> None:
    to("topic", "create", "Lagging", "--queues", "1")
    for number in range(5):
        to("send", "Lagging", f"message {number}")
    commit(broker, "billing", "Lagging", 2)
    (lag,) = from_json(to("group", "lag", "billing", "--topic", "Lagging", "--json"))
    assert (lag["consumed"], lag["stored"], lag["lag"]) == (2, 5, 3)
    assert {"group": "billing", "members": 0, "lag": 3} in from_json(to("group", "list", "--json"))

    for where, offset in (("begin", 0), ("end", 5), ("1h", 0)):
        (moved,) = from_json(to("group", "reset", "billing", "--topic", "Lagging", "--to", where, "--json"))
        assert moved["offset"] == offset, where


def test_stats_tell_every_part(to: Run) -> None:
    (counters,) = from_json(to("stats", "--json")).values()
    assert {name.split(".")[0] for name in counters} >= {"broker", "server", "store", "remoting", "nameserver"}
    (some,) = from_json(to("stats", "server.", "--json")).values()
    assert some
    assert all(name.startswith("server.") for name in some)


def test_the_counters_that_operations_names_exist(to: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    watching = page.partition("## Watching it")[2].partition("## ")[0]
    named = {name for row in re.findall(r"(?m)^\| (`.*?) \|", watching) for name in re.findall(r"`(.*?)`", row)}
    (counters,) = from_json(to("stats", "--json")).values()
    assert named
    assert named - set(counters) == set()


def test_stats_have_rocketmqs_names_too(to: Run) -> None:
    (counters,) = from_json(to("stats", "--rocketmq", "--json")).values()
    assert "putTps" in counters
    assert not any(name.startswith("martlet.") for name in counters)


def test_bench_reads_back_what_it_sent(to: Run) -> None:
    sent, received = from_json(to("bench", "--messages", "500", "--size", "100", "--in-flight", "16", "--json"))
    assert sent["messages"] == received["messages"] == 500
    assert sent["p50 ms"] <= sent["p99 ms"] <= sent["max ms"]


def test_a_reader_that_has_enough_ends_it_quietly(to: Run, broker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"line {number} {'x' * 200}\n" for number in range(1000))  # more than a pipe holds
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    to("send", "Piped")
    command = [sys.executable, "-m", "martlet", "tail", "Piped", "--from", "begin", "--no-follow", "-n", broker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert b"line" in child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 0


def blocks(language: str) -> list[str]:
    """The code of the README in *language*."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", readme, re.DOTALL)


def test_the_python_of_the_readme_runs(broker: str, tmp_path: Path) -> None:
    (code,) = blocks("python")
    script = tmp_path / "readme.py"
    script.write_text(code.replace("127.0.0.1:9876", broker))
    done = subprocess.run(patient.command(script), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ \d+\n", done.stdout)


def test_the_commands_of_the_readme_work(to: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("venv/bin/martlet ")]
    monkeypatch.chdir(tmp_path)
    ran = []
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "run":
            words = ["check", words[words.index("--config") + 1]] if "--config" in words else ["check", "/dev/null"]
        if words[0] == "tail":
            words += ["--count", "1"]  # it would follow for ever
        target = Path(words.pop()) if words[-2:-1] == [">"] else None
        if target is not None:
            words.pop()
        code, out, err = to(*words)
        assert (code, err) == (0, ""), line
        if target is not None:
            target.write_text(out)
        ran.append(words[0])
    assert {"send", "tail", "topic", "config", "check"} <= set(ran)


def test_nobody_at_the_address_has_a_code_of_its_own(martlet: Run) -> None:
    code, out, err = martlet("topic", "list", "--name-server", "127.0.0.1:1")
    assert (code, out) == (4, "")
    assert "127.0.0.1:1" in err
    assert "`martlet run` starts a broker" in err


WRONG = [
    (("topic", "stats", "Nothing"), "topic 'Nothing'"),
    (("topic", "create", "no/good"), "forbidden characters"),
    (("group", "lag", "nobody"), "group 'nobody' is unknown"),
    (("send", "Orders", "x", "--property", "novalue"), "'novalue' is not NAME=VALUE"),
    (("send", "Orders", ""), "has no body"),
    (("tail", "Orders", "--from", "yesterday"), "time 'yesterday' is unknown; for example"),
    (("tail", "Nothing"), "topic 'Nothing'"),
    (("message",), "give either an id or --key"),
    (("message", "--key", "4711"), "--key needs --topic"),
    (("message", "--key", "absent", "--topic", "TBW102"), "has key 'absent'"),
    (("message", "nonsense"), "message 'nonsense' was not found"),
    (("bench", "--size", "0"), "--size is 0; it must be at least 1"),
    (("topic", "list", "--name-server", "nonsense"), "address 'nonsense'"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG)
def test_what_goes_wrong_is_a_sentence_and_a_code(words: tuple[str, ...], sentence: str, to: Run) -> None:
    code, out, err = to(*words)
    assert (code, out) == (1, "")
    assert sentence in err
    assert err.startswith("martlet: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["topic", "group", "send", "tail", "message", "stats", "bench", "nameserver"])
def test_each_help_teaches_by_example(name: str, martlet: Run) -> None:
    code, out, _ = martlet(name, "--help")
    assert code == 0
    assert f"examples:\n  martlet {name}" in out


WAITING = [("tail", "Endless", "--from", "begin"), ("send", "Endless"), ("stats", "--every", "1000")]


@pytest.mark.parametrize("words", WAITING, ids=lambda words: words[0])
def test_ctrl_c_ends_what_waits(words: tuple[str, ...], to: Run, broker: str) -> None:
    to("send", "Endless", "the first")
    stored = messages_of(to, "Endless")
    command = [sys.executable, "-m", "martlet", *words, "-n", broker]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        if words[0] == "send":
            child.stdin.write(b"the second\n")
            child.stdin.flush()
            while messages_of(to, "Endless") == stored:
                assert child.poll() is None
        else:
            assert child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait() == 130
        assert b"Traceback" not in child.stderr.read()


def messages_of(to: Run, topic: str) -> int:
    return sum(row["messages"] for row in from_json(to("topic", "stats", topic, "--json")))
