"""The commands of `martlet` against the target: they speak to a real RocketMQ broker as to ours."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from . import fetch
from .conftest import Target
from .java import Java, message
from .process import eventually

Run = Callable[..., str]


@pytest.fixture
def martlet(target: Target) -> Run:
    """Run ``martlet WORDS`` against the target, which must succeed, and return what it says."""

    def run(*words: str, said: str = "") -> str:
        command = [sys.executable, "-m", "martlet", *words, "--name-server", target.name_server]
        done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_topic_is_made_filled_read_and_deleted(martlet: Run, name: Callable[[str], str]) -> None:
    topic = name("commands")
    martlet("topic", "create", topic, "--queues", "2")
    listed = {row["topic"]: row for row in json.loads(martlet("topic", "list", "--json"))}
    assert listed[topic]["queues"] == 2

    sent = json.loads(martlet("send", topic, "first", "--tag", "a", "--key", "k1", "--json"))
    assert sent["status"] == "OK"
    martlet("send", topic, said="second\nthird\n")

    stats = json.loads(martlet("topic", "stats", topic, "--json"))
    assert sum(row["messages"] for row in stats) == 3
    shown = martlet("tail", topic, "--from", "begin", "--no-follow")
    assert sorted(line.split()[-1] for line in shown.splitlines()) == ["first", "second", "third"]
    assert "first" in martlet("message", sent["offset_id"])

    martlet("topic", "delete", topic, "--yes")
    assert topic not in {row["topic"] for row in json.loads(martlet("topic", "list", "--json"))}


def test_groups_and_counters_are_shown(martlet: Run) -> None:
    assert "group" in martlet("group", "list", "--all")
    assert "putTps" in martlet("stats", "--rocketmq")


def test_dead_letters_of_a_java_group_are_listed_shown_and_resent(
    martlet: Run, newest: Java, name: Callable[[str], str]
) -> None:
    topic, group = name("dead"), name("group")
    [sent] = newest.producer(queues=1).send(message(topic, "poison", tags="T", keys="k"))
    consumer = newest.push(group, topic, failures=-1, retries_max=0)
    consumer.wait(1)

    def listed(waiting: int) -> bool | None:
        rows = {row["group"]: row for row in json.loads(martlet("dlq", "list", "--json"))}
        return True if group in rows and (rows[group]["messages"], rows[group]["not resent"]) == (1, waiting) else None

    eventually(lambda: listed(1))
    letter = json.loads(martlet("dlq", "show", group, "--json"))
    assert (letter["id"], letter["origin_topic"], letter["body"]) == (sent.msg_id, topic, "poison")
    route = newest.mqadmin("topicRoute", "-t", f"%DLQ%{group}")
    assert re.search(r'"perm":6,\s+"readQueueNums":1,', route), route
    consumer.heal()
    assert martlet("dlq", "resend", group) == f"1 message resent to group {group}\n"
    again = consumer.wait(2)[1]
    assert (again.topic, again.body, again.msg_id, again.accepted) == (topic, b"poison", sent.msg_id, True)
    eventually(lambda: listed(0))


def test_a_load_is_put_on_it(martlet: Run) -> None:
    sent, received = json.loads(martlet("bench", "--messages", "300", "--json"))
    assert sent["messages"] == received["messages"] == 300


def test_the_metrics_that_the_operations_page_compares_with_are_rocketmqs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`(rocketmq_\w+)`", page))
    constants = b""
    for path in fetch.server_jars().glob("rocketmq-*.jar"):
        with zipfile.ZipFile(path) as jar:
            constants += b"".join(jar.read(name) for name in jar.namelist() if "MetricsConstant" in name)
    assert named
    assert named - {name.decode() for name in re.findall(rb"rocketmq_\w+", constants)} == set()
