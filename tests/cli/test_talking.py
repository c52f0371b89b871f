"""The commands that talk to a broker, against one that runs."""

import io
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from tests.client.patient import command, patient

from martlet_client import Admin, Message, PullConsumer, blocking

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def to(martlet: Run, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command against the broker of this module, found as RocketMQ's own tools find it."""
    monkeypatch.setenv("NAMESRV_ADDR", addresses["nameserver"])
    monkeypatch.setenv("MARTLET_MQTT", addresses["mqtt"])
    return martlet


def from_json(answer: tuple[int, str, str]) -> Any:
    code, out, err = answer
    assert (code, err) == (0, "")
    return json.loads(out)


def many_from_json(text: str) -> list[Any]:
    """The objects of *text*, one on each line."""
    return [json.loads(line) for line in text.splitlines()]


def commit(broker: str, group: str, topic: str, offset: int) -> None:
    """Let *group* have consumed below *offset* in every queue of *topic*."""

    async def work() -> None:
        async with Admin(patient(broker)) as admin:
            await admin.create_group(group)
        async with PullConsumer(patient(broker), group) as consumer:
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
    assert listed["Born"] == {"topic": "Born", "brokers": 1, "queues": 3, "perm": "r", "retention": "log"}
    assert "TBW102" not in listed
    assert to("topic", "delete", "Born", "--yes") == (0, "topic Born is deleted\n", "")
    assert "Born" not in {row["topic"] for row in from_json(to("topic", "list", "--json"))}


def test_a_topic_gets_a_retention_of_its_own_and_loses_it(to: Run) -> None:
    def retention() -> object:
        return {row["topic"]: row["retention"] for row in from_json(to("topic", "list", "--json"))}["Alarms"]

    assert to("topic", "create", "Alarms", "--retention", "24")[0] == 0
    assert retention() == "24 h"
    to("topic", "create", "Alarms", "--queues", "4")
    assert retention() == "24 h"
    code, _, err = to("topic", "create", "Alarms", "--retention", "73")
    assert (code, "all topics share one log, which keeps them for 72" in err) == (1, True)
    to("topic", "create", "Alarms", "--retention", "0")
    assert retention() == "log"


def test_a_topic_that_is_changed_keeps_what_is_not_given(to: Run) -> None:
    def listed() -> tuple[object, ...]:
        row = {row["topic"]: row for row in from_json(to("topic", "list", "--json"))}["Narrow"]
        return row["queues"], row["perm"], row["retention"]

    to("topic", "create", "Narrow", "--queues", "1", "--perm", "r")
    assert to("topic", "create", "Narrow", "--retention", "24") == (0, "topic Narrow has 1 queue on martlet\n", "")
    assert listed() == (1, "r", "24 h")
    to("topic", "create", "Narrow", "--perm", "rw")
    assert listed() == (1, "rw", "24 h")
    to("topic", "create", "Narrow", "--queues", "2")
    assert listed() == (2, "rw", "24 h")
    to("topic", "delete", "Narrow", "--yes")


def test_fewer_queues_keep_their_messages_unless_they_are_forced_away(
    to: Run, addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert to("topic", "create", "Shrunk", "--queues", "4")[0] == 0
    with blocking.Producer(patient(addresses["nameserver"]), "shrinking") as producer:
        for number in range(8):
            queue = producer.queues("Shrunk")[number % 4]
            producer.send(Message("Shrunk", b"%d" % number), queue=queue)
    shrunk = "topic Shrunk has 1 queue on martlet\n"
    kept = "3 more queues with 6 messages: readable until all known consumers have read them, or --force is given\n"
    assert to("topic", "create", "Shrunk", "--queues", "1") == (0, shrunk + kept, "")
    assert to("topic", "create", "Shrunk", "--retention", "24") == (0, shrunk + kept, "")
    found = from_json(to("topic", "create", "Shrunk", "--queues", "1", "--json"))
    assert (found["kept_queues"], found["kept_messages"], found["lost_messages"]) == (3, 6, 0)
    tailed = to("tail", "Shrunk", "--from", "begin", "--count", "8")[1]
    assert len(tailed.splitlines()) == 8
    monkeypatch.setattr(sys, "stdin", io.StringIO("no\n"))
    code, _, err = to("topic", "create", "Shrunk", "--queues", "1", "--force")
    assert (code, "stay readable until they are consumed; answer yes" in err) == (1, True)
    lost = "6 messages that not every consumer had read were in other queues and are lost\n"
    assert to("topic", "create", "Shrunk", "--queues", "1", "--force", "--yes") == (0, shrunk + lost, "")
    assert len(to("tail", "Shrunk", "--from", "begin", "--count", "2")[1].splitlines()) == 2
    assert to("topic", "create", "Shrunk", "--queues", "1") == (0, shrunk, "")
    to("topic", "delete", "Shrunk", "--yes")


def test_the_systems_topics_are_shown_on_demand(to: Run) -> None:
    assert "TBW102" in {row["topic"] for row in from_json(to("topic", "list", "--all", "--json"))}


def test_a_topic_is_not_deleted_without_a_yes(to: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    to("topic", "create", "Kept")
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    code, _, err = to("topic", "delete", "Kept")
    assert code == 1
    assert "topic 'Kept' was not deleted; answer yes, or give --yes" in err
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


def test_tail_selects_by_sql(to: Run) -> None:
    to("topic", "create", "Priced", "--queues", "1")
    for price in (5, 50, 500):
        to("send", "Priced", f"costs {price}", "--property", f"price={price}")
    words = ("tail", "Priced", "--from", "begin", "--no-follow", "--sql")
    assert [m["body"] for m in many_from_json(to(*words, "price > 40", "--json")[1])] == ["costs 50", "costs 500"]
    code, out, err = to(*words, "price > 40 AND")
    assert (code, out) == (1, "")
    assert "is invalid at character 15, its end: expected a value" in err
    assert to(*words, " ")[0] == 2
    assert to(*words, "price > 40", "--tag", "books")[0] == 2


def test_tail_refuses_faulty_sql_even_if_there_is_nothing_to_read(to: Run) -> None:
    to("topic", "create", "Unread", "--queues", "2")
    to("topic", "create", "Passed", "--queues", "1")
    to("send", "Passed", "old")
    for topic in ("Unread", "Passed"):
        code, out, err = to("tail", topic, "--sql", "price >=", "--no-follow")
        assert (code, out) == (1, "")
        assert err.count("SQL92 expression 'price >=' is invalid at character 9, its end: expected a value") == 1
        assert to("tail", topic, "--sql", "price >= 1", "--no-follow") == (0, "", "")


def test_a_body_may_follow_options(to: Run) -> None:
    assert to("send", "Words", "--tag", "books", "one book")[0] == 0
    assert to("send", "--tag", "books", "Words", "--delay-level", "0", "two books")[0] == 0
    shown = many_from_json(to("tail", "Words", "--from", "begin", "--no-follow", "--json")[1])
    assert sorted(message["body"] for message in shown) == ["one book", "two books"]
    sent = from_json(to("send", "Words", "--json", "three books"))
    assert "three books" in to("message", "--topic", "Words", sent["id"])[1]
    code, out, err = to("send", "Words", "--tag", "books", "one", "book")
    assert (code, out) == (2, "")
    assert "unrecognized arguments: book" in err
    code, out, err = to("send")
    assert (code, out) == (2, "")
    assert "the following arguments are required: topic" in err


def test_tail_begins_at_a_time(to: Run) -> None:
    to("send", "Timed", "old enough")
    assert "old enough" in to("tail", "Timed", "--from", "1h", "--no-follow")[1]
    assert to("tail", "Timed", "--from", "2099-01-01", "--no-follow")[1] == ""


def test_tail_says_that_an_offset_is_beyond_the_end(to: Run) -> None:
    to("topic", "create", "Short", "--queues", "1")
    for number in range(4):
        to("send", "Short", f"message {number}")
    assert to("tail", "Short", "--from", "4", "--no-follow") == (0, "", "")
    assert "message 3" in to("tail", "Short", "--from", "3", "--no-follow")[1]
    code, out, err = to("tail", "Short", "--from", "99", "--no-follow")
    assert (code, out) == (1, "")
    assert "--from 99 is beyond the end of queue 0 of topic 'Short'; messages end at offset 4" in err


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


def test_counters_are_numbers_in_json(to: Run) -> None:
    (counters,) = from_json(to("stats", "store.", "--json")).values()
    assert type(counters["store.appended_messages"]) is int
    assert type(counters["store.disk_used_ratio"]) is float
    assert counters["store.refused"] == ""


ABSENT = "acl.", "tiered.", "certificates."  # the broker of these tests has no such plugin, and no certificate


def documented(section: str) -> list[str]:
    """Return the counters in the first column of a table of docs/operations.md, with N, NAME and DIRECTORY in them."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    text = re.split("\n#", page.partition(f"## {section}\n")[2])[0]
    return [name for row in re.findall(r"(?m)^\| (`.*?) \|", text) for name in re.findall(r"`(.*?)`", row)]


def test_the_counters_to_watch_exist(to: Run) -> None:
    (counters,) = from_json(to("stats", "--json")).values()
    named = set(documented("Monitoring"))
    assert named
    assert {name for name in named if not name.startswith(ABSENT)} - set(counters) == set()


def test_the_table_of_all_statistics_has_what_the_broker_reports(to: Run) -> None:
    to("send", "Later", "x", "--delay-level", "1")
    rocketmqs: dict[str, object] = {}
    while not any(name.startswith("scheduleMessageOffset_") for name in rocketmqs):  # until its delay of 1 s is over
        (rocketmqs,) = from_json(to("stats", "--rocketmq", "--json")).values()
    (own,) = from_json(to("stats", "--json")).values()
    assert any(name.startswith("delay_levels.pending_") for name in own)
    patterns = ((r"_\d+", "_N"), (r"^projections\..*", "projections.NAME"), (r"_/.*", "_DIRECTORY"))

    def general(name: str) -> str:
        for pattern, word in patterns:
            name = re.sub(pattern, word, name)
        return name

    named = documented("All statistics")
    assert len(named) == len(set(named))
    assert {name for name in named if not name.startswith(ABSENT)} == {general(name) for name in (*own, *rocketmqs)}


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


# Those of `martlet pipeline` need Spark; tests/spark runs them.
MARTLET_LINE: Final = re.compile("venv/bin/martlet (?!pipeline)")


def blocks(language: str) -> list[str]:
    """The code of the README in *language*."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", readme, re.DOTALL)


def test_the_python_of_the_readme_runs(broker: str, tmp_path: Path) -> None:
    (code,) = (block for block in blocks("python") if "spark" not in block)
    script = tmp_path / "readme.py"
    script.write_text(code.replace("127.0.0.1:9876", broker))
    done = subprocess.run(command(script), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ \d+\n", done.stdout)


def test_the_commands_of_the_readme_work(to: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if MARTLET_LINE.match(line)]
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
    assert {"send", "tail", "topic", "config", "check", "mqtt"} <= set(ran)


def test_nobody_at_the_address_has_a_code_of_its_own(martlet: Run) -> None:
    code, out, err = martlet("topic", "list", "--name-server", "127.0.0.1:1")
    assert (code, out) == (3, "")
    assert "Connection refused" in err
    assert "127.0.0.1:1" in err
    assert "start a broker with `martlet run`" in err


WRONG = [
    (1, ("topic", "stats", "Nothing"), "topic 'Nothing' is unknown to the name server; check the name in the list"),
    (1, ("topic", "delete", "Nothing", "--yes"), "topic 'Nothing' is unknown to the name server; check the name"),
    (1, ("topic", "create", "no/good"), "forbidden characters"),
    (1, ("group", "lag", "nobody"), "group 'nobody' is unknown"),
    (1, ("group", "delete", "nobody", "--yes"), "group 'nobody' is unknown"),
    (1, ("group", "delete", "TOOLS_CONSUMER", "--yes"), "group 'TOOLS_CONSUMER' is built in and cannot be deleted"),
    (1, ("group", "reset", "nobody", "--topic", "TBW102", "--to", "end"), "group 'nobody' is unknown"),
    (1, ("dlq", "show", "nobody"), "group 'nobody' is unknown; `martlet dlq list`"),
    (1, ("send", "Orders", ""), "has no body"),
    (1, ("tail", "Nothing"), "topic 'Nothing'"),
    (1, ("tail", "TBW102", "--queue", "4711"), "topic 'TBW102' has no queue 4711; it has 0 to 7"),
    (1, ("message", "--key", "absent", "--topic", "TBW102"), "key 'absent' has no message in topic 'TBW102'"),
    (1, ("message", "nonsense"), "message id 'nonsense' is not an offset_id"),
    (3, ("message", "7F000001000000010000000000000000"), "connection to 127.0.0.1:1 cannot be opened: Connection"),
    (1, ("message", "7F000001000000010000000000000000", "--topic", "TBW102"), "was not found"),
    (1, ("stats", "zzz"), "counter 'zzz' is unknown; `martlet stats` lists all"),
    (1, ("stats", "server.", "zzz"), "counter 'zzz' is unknown"),
    (2, ("topic", "create", "T", "--queues", "0"), "--queues '0' is out of range; it must be 1 to"),
    (2, ("topic", "create", "T", "--queues", "many"), "--queues 'many' is not a whole number; for example 1"),
    (2, ("topic", "create"), "the following arguments are required: topic; see `martlet topic create --help`"),
    (2, ("topic", "destroy", "T"), "invalid choice: 'destroy'"),
    (2, ("topic", "create", "T", "--quees", "3"), "option '--quees' is unknown; did you mean '--queues'?\n"),
    (2, ("send", "T", "x", "--tga=a"), "option '--tga' is unknown; did you mean '--tag'?\n"),
    (2, ("topic", "create", "T", "U"), "unrecognized arguments: U; see `martlet topic create --help`"),
    (2, ("plugins", "--jsn"), "option '--jsn' is unknown; did you mean '--json'?\n"),
    (2, ("topic", "lst"), "argument ACTION: 'lst' is unknown; did you mean 'list'?\n"),
    (2, ("topic", "create", "T", "--perm", "rwx"), "argument --perm: 'rwx' is unknown; did you mean 'rw'?\n"),
    (2, ("group", "create", "G", "--retries", "-1"), "--retries '-1' is out of range"),
    (2, ("group", "reset", "G", "--topic", "T", "--to", "noon"), "--to 'noon' is not a place in a queue; give begin"),
    (2, ("send", "Orders", "x", "--property", "novalue"), "--property 'novalue' is not NAME=VALUE; for example"),
    (2, ("send", "Orders", "x", "--file", "y"), "body 'x' was given along with --file 'y'"),
    (2, ("send", "Orders", "--file", "/nowhere/y"), "file '/nowhere/y' cannot be read; No such file or directory"),
    (2, ("send", "Orders", "x", "--key-separator", ":"), "--key-separator applies only to lines of stdin"),
    (2, ("send", "Orders", "--key-separator", ""), "--key-separator '' is empty"),
    (2, ("tail", "Orders", "--from", "yesterday"), "--from 'yesterday' is not a place in a queue; give begin"),
    (2, ("tail", "Orders", "--count", "0"), "--count '0' is out of range; it must be 1 to"),
    (2, ("tail", "Orders", "--queue", "-1"), "--queue '-1' is out of range"),
    (2, ("message",), "command needs either a message id or --key"),
    (2, ("message", "--key", "4711"), "--key '4711' needs a topic"),
    (2, ("stats", "--every", "-1"), "--every '-1' is out of range; it must be more than 0"),
    (2, ("stats", "--every", "nan"), "--every 'nan' is out of range"),
    (2, ("stats", "--every", "soon"), "--every 'soon' is not a number of seconds; for example 2.5"),
    (2, ("bench", "--size", "0"), "--size '0' is out of range; it must be 1 to"),
    (2, ("topic", "list", "--timeout", "0"), "--timeout '0' is out of range"),
    (2, ("topic", "list", "-n", "127.0.0.1"), "name server '127.0.0.1' is not a host and a port; write HOST:PORT"),
    (2, ("topic", "list", "-n", "http://names:9876"), "name server 'http://names:9876' is not a host and a port"),
    (2, ("topic", "list", "-n", "names:98765"), "name server 'names:98765' has an invalid port"),
    (2, ("topic", "list", "-n", ";"), "name server ';' is empty; write HOST:PORT"),
    (2, ("topic", "list", "--tls-ca", "/nowhere/ca"), "TLS authority '/nowhere/ca' cannot be used; No such file"),
    (2, ("topic", "list", "--tls-key", "key.pem"), "TLS key 'key.pem' has no certificate"),
    (2, ("topic", "list", "--config", "/nowhere/toml"), "config file '/nowhere/toml' cannot be read"),
    (
        2,
        ("topic", "list", "--access-key", "ann"),
        "access key 'ann' has no secret; set client.secret_file",
    ),
    (2, ("topic", "list", "--secret-file", "f"), "secret file 'f' has no access key; set client.access_key as well"),
    (2, ("topic", "list", "--access-key", "ann", "--secret-file", "/nowhere"), "secret file '/nowhere' cannot be read"),
    (2, ("topic", "list", "--access-key", "ann", "--secret-file", "/dev/null"), "secret file '/dev/null' is empty"),
    (3, ("topic", "list", "-n", "127.0.0.1:1"), "Connection refused; start a broker with `martlet run`"),
    (1, ("dlq", "show", "no/good"), "group 'no/good' has forbidden characters"),
    (1, ("dlq", "resend", ""), "group is empty; it needs a name"),
    (2, ("tail", "Orders", "--tag", ""), "--tag '' is not a list of tags; give for example 'books || pens' or '*'"),
    (2, ("tail", "Orders", "--tag", " || "), "--tag ' || ' is not a list of tags"),
    (2, ("tail", "Orders", "--tag", "* || a"), "--tag '* || a' is not a list of tags"),
    (2, ("ping", "--broker", "127.0.0.1"), "--broker '127.0.0.1' is not a host and a port; write HOST:PORT"),
    (2, ("ping", "--broker", ""), "--broker '' is not a host and a port"),
    (2, ("ping", "--broker", "127.0.0.1:99999"), "--broker '127.0.0.1:99999' has an invalid port; use 1 to 65535"),
    (
        2,
        ("tail", "Orders", "--tag", "\udcff"),
        "tag '\\udcff' is not UTF-8; only bodies and file names may contain other bytes",
    ),
    (2, ("message", "--key", "\udcff", "--topic", "T"), "key '\\udcff' is not UTF-8"),
    (2, ("message", "\udcff", "--topic", "T"), "id '\\udcff' is not UTF-8"),
    (2, ("send", "Orders", "x", "--property", "a=\udcff"), "property 'a=\\udcff' is not UTF-8"),
    (2, ("send", "Orders", "--key-separator", "\udcff"), "key separator '\\udcff' is not UTF-8"),
    (2, ("dlq", "resend", "g", "--topic", "\udcff"), "topic '\\udcff' is not UTF-8"),
    (3, ("ping", "--broker", "127.0.0.1:1"), "connection to 127.0.0.1:1 cannot be opened: Connection refused"),
]


@pytest.mark.parametrize(("code", "words", "sentence"), WRONG)
def test_what_goes_wrong_is_a_sentence_and_a_code(code: int, words: tuple[str, ...], sentence: str, to: Run) -> None:
    found, out, err = to(*words)
    assert (found, out) == (code, ""), err
    assert sentence in err
    assert err.startswith("martlet: ")
    assert err.count("\n") == 1


def test_ping_says_that_an_address_is_no_brokers(to: Run, broker: str) -> None:
    assert to("ping", "--broker", broker) == (
        3,
        "",
        f"martlet: {broker} answers, but is no broker: it may be a name server's port\n",
    )


def test_a_secret_of_the_environment_that_is_not_utf8_is_a_wrong_configuration(
    to: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARTLET_SECRET", "\udcff")
    code, _, err = to("ping", "--access-key", "ann")
    assert (code, err) == (
        2,
        "martlet: secret of access key 'ann' contains half of a surrogate pair; decode it as UTF-8\n",
    )


NAMES = ["topic", "group", "send", "tail", "message", "dlq", "ping", "stats", "bench", "nameserver"]


@pytest.mark.parametrize("name", NAMES)
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


def test_a_group_lives_from_create_to_delete(to: Run, broker: str) -> None:
    to("topic", "create", "Grouped", "--queues", "1")
    to("send", "Grouped", "one")
    assert to("group", "create", "made", "--retries", "1") == (0, "group made is on martlet, with 1 retry\n", "")
    assert {"group": "made", "members": 0, "lag": 0} in from_json(to("group", "list", "--json"))
    commit(broker, "made", "Grouped", 1)
    assert to("group", "delete", "made", "--keep-offsets", "--yes") == (0, "group made is deleted\n", "")
    to("group", "create", "made")
    assert [row["consumed"] for row in from_json(to("group", "lag", "made", "--json"))] == [1]
    to("group", "delete", "made", "--yes")
    to("group", "create", "made")
    assert from_json(to("group", "lag", "made", "--json")) == []


def test_a_group_is_not_deleted_without_a_yes(to: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    to("group", "create", "kept")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err = to("group", "delete", "kept")
    assert (code, "group 'kept' was not deleted; answer yes, or give --yes" in err) == (1, True)
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    assert to("group", "delete", "kept")[0] == 0


def test_a_group_with_members_is_not_deleted(to: Run, broker: str) -> None:
    to("topic", "create", "Joined")
    with blocking.PushConsumer(patient(broker), "joined", lambda message: None, {"Joined": "*"}):
        code, _, err = to("group", "delete", "joined", "--yes")
    assert code == 1
    assert "group 'joined' has 1 connected member; stop them first" in err


def test_a_group_is_reset_to_a_number(to: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    to("topic", "create", "Numbered", "--queues", "2")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"message\n" * 8)))
    to("send", "Numbered")  # one producer, which takes the queues in turn
    to("group", "create", "counting")
    words = ("group", "reset", "counting", "--topic", "Numbered")
    moved = from_json(to(*words, "--to", "2", "--json"))
    assert [(row["queue"], row["offset"]) for row in moved] == [(0, 2), (1, 2)]
    moved = from_json(to(*words, "--to", "3", "--queue", "1", "--json"))
    assert [(row["queue"], row["offset"]) for row in moved] == [(1, 3)]
    moved = from_json(to(*words, "--to", "end", "--queue", "0", "--json"))
    assert [(row["queue"], row["offset"]) for row in moved] == [(0, 4)]
    moved = from_json(to(*words, "--to", "1h", "--queue", "0", "--json"))
    assert [(row["queue"], row["offset"]) for row in moved] == [(0, 0)]

    code, _, err = to(*words, "--to", "5")
    assert code == 1
    assert "offset 5 is out of range in queue 0 of broker martlet, which has 0 to 4; nothing was reset" in err
    code, _, err = to(*words, "--to", "0", "--queue", "2")
    assert (code, "topic 'Numbered' has no queue 2; it has 0 to 1" in err) == (1, True)
    found = {row["queue"]: row["consumed"] for row in from_json(to("group", "lag", "counting", "--json"))}
    assert found == {0: 0, 1: 3}


def test_tail_begins_at_an_offset_of_one_queue(to: Run) -> None:
    to("topic", "create", "Offsets", "--queues", "1")
    for number in range(3):
        to("send", "Offsets", f"message {number}")
    (message,) = many_from_json(to("tail", "Offsets", "--queue", "0", "--from", "1", "--count", "1", "--json")[1])
    assert (message["offset"], message["body"]) == (1, "message 1")


def test_tail_and_bench_leave_no_group_behind(to: Run) -> None:
    to("send", "Read", "one")
    before = to("group", "list", "--all", "--json")
    assert to("tail", "Read", "--from", "begin", "--count", "1")[0] == 0
    assert to("bench", "--messages", "10")[0] == 0
    assert to("group", "list", "--all", "--json") == before


def test_rates_are_of_what_changed(to: Run) -> None:
    (rates,) = from_json(to("stats", "--rates", "--json")).values()
    assert rates["remoting.requests"] > 0, "our own question at least"
    assert "server.connections_max" not in rates
    code, out, _ = to("stats", "--rates", "store.log_start")
    assert (code, "nothing changed" in out) == (0, True)


def test_ping_says_that_all_answer(to: Run) -> None:
    code, out, err = to("ping")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"name server at \S+ answers in [\d.]+ ms\nbroker martlet at \S+ answers in [\d.]+ ms\n", out)
    assert to("ping", "--quiet") == (0, "", "")
    name_server, broker = from_json(to("ping", "--json"))
    assert (name_server["role"], broker["role"], broker["error"]) == ("name server", "broker", None)
    assert to("ping", "--broker", broker["address"])[0] == 0


def test_ping_without_a_broker_is_a_no(martlet: Run, start: Callable[..., Any]) -> None:
    names = start("nameserver").addresses()["nameserver"]
    code, out, err = martlet("ping", "-n", names)
    assert code == 1
    assert out.startswith("name server at ")
    assert err == "martlet: no broker is registered with the name server; `martlet run` starts one\n"


def test_a_brokers_port_is_no_name_server(to: Run) -> None:
    _, broker = from_json(to("ping", "--json"))
    code, out, err = to("topic", "list", "-n", broker["address"])
    assert (code, out) == (3, "")
    assert f"server '{broker['address']}' is not a name server" in err


def test_a_port_of_another_protocol_is_told_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        web = threading.Thread(target=answer)
        web.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        words = [sys.executable, "-m", "martlet", "ping", "-n", address]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        web.join()
    assert (done.returncode, done.stdout) == (3, "")
    assert "the port speaks another protocol, its first bytes are b'HTTP/1.1 400 Bad'" in done.stderr
    assert done.stderr.count("\n") == 1
