"""What `martlet send` makes messages of: arguments, files and lines of stdin; and what it says of the rest."""

import base64
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from martlet_client import ClientError
from martlet_remoting.commands.send import Item, send_each

Run = Callable[..., tuple[int, str, str]]
LIMIT = 4 * 1024 * 1024


@pytest.fixture
def to(martlet: Run, broker: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NAMESRV_ADDR", broker)
    return martlet


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    return lambda data: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def read(to: Run, topic: str) -> list[dict[str, Any]]:
    """The messages of *topic*, oldest first."""
    code, out, err = to("tail", topic, "--from", "begin", "--no-follow", "--json")
    assert (code, err) == (0, "")
    return sorted(map(json.loads, out.splitlines()), key=lambda message: (message["stored_ms"], message["id"]))


def test_a_file_is_one_message_byte_for_byte(to: Run, tmp_path: Path) -> None:
    binary, text = tmp_path / "binary", tmp_path / "text"
    binary.write_bytes(bytes(range(256)))
    text.write_bytes(b"two\nlines\r\n\n")
    assert to("send", "Files", "--file", str(binary), "-f", str(text)) == (0, "2 messages stored\n", "")
    found = {message["body"]: message["body_encoding"] for message in read(to, "Files")}
    assert found == {"two\nlines\r\n\n": "utf-8", base64.b64encode(bytes(range(256))).decode(): "base64"}


def test_all_of_stdin_is_one_message_on_demand(to: Run, stdin: Callable[[bytes], None]) -> None:
    stdin(b"one\n\ntwo\n")
    code, out, _ = to("send", "Whole", "--file", "-")
    assert (code, out.partition(" on ")[0]) == (0, "stored")
    assert [message["body"] for message in read(to, "Whole")] == ["one\n\ntwo\n"]


def test_a_body_of_the_command_line_may_have_newlines(to: Run) -> None:
    to("send", "Newlines", "one\ntwo\n")
    assert [message["body"] for message in read(to, "Newlines")] == ["one\ntwo\n"]


def test_a_delayed_message_does_not_arrive_at_once(to: Run) -> None:
    code, out, _ = to("send", "Later", "in two hours", "--delay-level", "18")
    assert (code, out.partition(" on ")[0]) == (0, "stored")
    to("send", "Later", "now")
    assert [message["body"] for message in read(to, "Later")] == ["now"]
    (counters,) = json.loads(to("stats", "delay_levels.", "--json")[1]).values()
    assert counters["delay_levels.pending_18"] == 1
    code, _, err = to("send", "Later", "x", "--delay-level", "soon")
    assert (code, "--delay-level 'soon' is not a whole number" in err) == (2, True)


def test_a_message_with_a_delay_is_pending_until_it_is_recalled(to: Run) -> None:
    code, out, _ = to("send", "Timed", "x", "--delay", "1h30m")
    stored, recall = out.splitlines()
    assert (code, stored.partition(" on ")[0]) == (0, "stored")
    (pending,) = json.loads(to("timer", "list", "--json")[1])
    assert pending["due"] - pending["stored"] in range(5_400_000 - 10, 5_400_000 + 60_000)
    words = recall.removeprefix("recall it with: martlet ").split()
    assert to(*words)[0] == 0
    assert json.loads(to("timer", "list", "--json")[1]) == []
    assert read(to, "Timed") == []


@pytest.mark.parametrize("text", ["2100-01-01T12:00:30+00:00", "4102488030000", "2100-01-01 13:00:30+01:00"])
def test_a_message_may_have_a_time(to: Run, text: str) -> None:
    code, _, err = to("send", "Timed", "x", "--deliver-at", text)
    # The broker's limit is 3 days: its answer shows that the time arrived.
    assert code == 1
    assert "property TIMER_DELIVER_MS 4102488030000 is" in err
    assert "the maximum is 259200000 ms (timer.delay_max_s = 259200)" in err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--delay", "soon"), "--delay 'soon' is not a length of time; give for example 500ms, 30s, 10m, 1h30m or 2d"),
        (("--delay", "10"), "--delay '10' is not a length of time"),
        (("--delay", "-5s"), "--delay"),
        (("--delay", "0s"), "--delay '0s' is out of range; give at least 1ms"),
        (("--delay", "999999999999d"), "--delay '999999999999d' is out of range"),
        (("--deliver-at", "tomorrow"), "--deliver-at 'tomorrow' is not a time; give for example 2026-03-01T12:00"),
        (("--deliver-at", "1700000000"), "--deliver-at '1700000000' is not a time"),
        (("--deliver-at", "1969-01-01T00:00"), "--deliver-at '1969-01-01T00:00' is before 1970"),
        (
            ("--delay", "1s", "--delay-level", "3"),
            "--delay and --delay-level were given together; a message has one delay, give only one of them",
        ),
        (("--delay", "1s", "--deliver-at", "2100-01-01T12:00"), "--delay and --deliver-at were given together"),
    ],
)
def test_a_wrong_delay_is_refused_before_anything_is_sent(to: Run, arguments: tuple[str, ...], error: str) -> None:
    code, out, err = to("send", "Timed", "x", *arguments)
    assert (code, out) == (2, "")
    assert error in err


def test_one_message_is_not_said_in_the_plural(to: Run, stdin: Callable[[bytes], None]) -> None:
    stdin(b"one\n")
    assert to("send", "Plural") == (0, "1 message stored\n", "")


def test_lines_have_their_own_keys(to: Run, stdin: Callable[[bytes], None]) -> None:
    stdin(b"a:one\nb:two:three\n")
    assert to("send", "Keyed", "--key-separator", ":", "--key", "all") == (0, "2 messages stored\n", "")
    assert [(m["keys"], m["body"]) for m in read(to, "Keyed")] == [(["all", "a"], "one"), (["all", "b"], "two:three")]
    assert json.loads(to("message", "--key", "b", "--topic", "Keyed", "--json")[1])[0]["body"] == "two:three"


@pytest.mark.parametrize("line", [b"nothing", b":body", b"key:"])
def test_a_line_without_a_key_ends_it_and_what_was_stored_is_told(
    line: bytes, to: Run, stdin: Callable[[bytes], None]
) -> None:
    stdin(b"a:one\n" + line + b"\nb:two\n")
    code, out, err = to("send", "Unkeyed", "--key-separator", ":")
    assert (code, out) == (1, "")
    assert "martlet: 1 message stored before the error\n" in err
    assert f"martlet: line 2 is not KEY:BODY; its first bytes are {line!r}\n" in err


def test_a_key_that_is_not_utf_8_is_refused(to: Run, stdin: Callable[[bytes], None]) -> None:
    stdin(b"a:one\n\xff:two\n")
    code, out, err = to("send", "Latin", "--key-separator", ":")
    assert (code, out) == (1, "")
    assert "martlet: key b'\\xff' of line 2 is not UTF-8; only bodies may contain other bytes\n" in err
    assert [message["keys"] for message in read(to, "Latin")] == [["a"]]


async def test_what_is_under_way_when_a_line_is_refused_is_stored_and_counted() -> None:
    stored: list[bytes] = []
    refused, answered = trio.Event(), trio.Event()

    def items() -> Iterator[Item]:
        yield from map(Item, (b"first", b"second", b"third"))
        trio.from_thread.run_sync(refused.set)
        raise ClientError("line 4 is refused")

    async def send_one(item: Item) -> None:
        if item.body != b"first":
            await answered.wait()
        stored.append(item.body)

    async def broker() -> None:
        await refused.wait()
        await wait_all_tasks_blocked(0.05)
        answered.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(broker)
        with pytest.raises(ClientError, match="line 4"):
            await send_each(items(), send_one)
    assert sorted(stored) == [b"first", b"second", b"third"]


def test_blank_lines_are_told(to: Run, stdin: Callable[[bytes], None]) -> None:
    stdin(b"one\n\n\r\ntwo\r\n\n")
    code, out, err = to("send", "Blank")
    assert (code, out) == (0, "2 messages stored\n")
    assert err == "martlet: 3 blank lines not sent; brokers refuse empty messages\n"
    assert [message["body"] for message in read(to, "Blank")] == ["one", "two"]


def test_json_of_many_is_one_object_on_each_line(to: Run, stdin: Callable[[bytes], None]) -> None:
    stdin(b"one\ntwo\nthree\n")
    code, out, err = to("send", "ManyJson", "--json")
    assert (code, err) == (0, "")
    sent = [json.loads(line) for line in out.splitlines()]
    assert {each["id"] for each in sent} == {message["id"] for message in read(to, "ManyJson")}


def test_the_id_is_the_same_wherever_it_is_shown(to: Run) -> None:
    _, out, _ = to("send", "Ids", "one")
    shown = out.rstrip().rpartition("id ")[2]
    (tailed,) = read(to, "Ids")
    (found,) = json.loads(to("message", shown, "--topic", "Ids", "--json")[1])
    assert shown == tailed["id"] == found["id"]
    (by_offset,) = json.loads(to("message", tailed["offset_id"], "--json")[1])
    assert by_offset == found
    assert f"id            {shown}\n" in to("message", shown, "--topic", "Ids")[1]


def test_an_id_without_a_topic_says_what_is_missing(to: Run) -> None:
    _, out, _ = to("send", "Ids", "one")
    code, _, err = to("message", out.rstrip().rpartition("id ")[2])
    assert code == 1
    assert err.endswith("; give --topic to find a message by its id\n")


def test_what_no_body_can_hold_is_refused_before_it_is_in_memory(
    to: Run, stdin: Callable[[bytes], None], tmp_path: Path
) -> None:
    stdin(b"a\n" + bytes(LIMIT + 70_000) + b"\n")
    assert to("send", "Large")[2].endswith(
        f"martlet: line 2 is larger than {LIMIT} bytes, the limit of a body; send less\n"
    )
    large, empty = tmp_path / "large", tmp_path / "empty"
    large.write_bytes(bytes(LIMIT + 1))
    empty.touch()
    code, out, err = to("send", "Large", "--file", str(large))
    assert (code, out) == (1, "")
    assert f"file {str(large)!r} is larger than {LIMIT} bytes" in err
    code, out, err = to("send", "Large", "--file", str(empty))
    assert (code, out) == (1, "")
    assert f"file {str(empty)!r} is empty; brokers refuse empty messages" in err


def test_a_refusal_is_said_once(to: Run, stdin: Callable[[bytes], None]) -> None:
    stdin(b"".join(b"line %d\n" % number for number in range(100)))
    code, out, err = to("send", "SCHEDULE_TOPIC_XXXX")
    assert (code, out) == (1, "")
    assert err.count("is forbidden") == 1
    assert err.count("\n") == 1


def command(broker: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "martlet", *words, "-n", broker]


def test_closed_stdin_is_a_wrong_command_line(broker: str) -> None:
    line = "exec 0<&-; exec " + " ".join(f"'{word}'" for word in command(broker, "send", "Closed"))
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "martlet: body is missing and stdin is closed; give a body or --file\n"


@pytest.mark.parametrize("words", [("send", "Closed", "one"), ("topic", "list"), ("tail", "TBW102", "--no-follow")])
def test_closed_stdout_is_no_failure(words: tuple[str, ...], broker: str) -> None:
    line = "exec 1>&-; exec " + " ".join(f"'{word}'" for word in command(broker, *words))
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_cannot_be_written_is_a_failure(broker: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command(broker, "topic", "list"), stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"martlet: input or output failed; No space left on device\n")
