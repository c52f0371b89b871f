"""`martlet acl`: each command, through the socket of a running broker and on the files of one that does not run."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from martlet_acl.policy.quotas import LIMITS

from .conftest import Process

Run = Callable[..., tuple[int, str, str]]
PLUGINS = 'plugins.enabled=["nameserver", "remoting", "mqtt", "stomp", "acl"]'


class Acl:
    """Runs ``martlet acl WORDS`` for one data directory."""

    def __init__(self, martlet: Run, directory: Path) -> None:
        self._martlet = martlet
        self.directory = directory

    def run(self, text: str) -> tuple[int, str, str]:
        return self._martlet("acl", *shlex.split(text), "--data", str(self.directory))

    def done(self, text: str) -> str:
        """Run a command that succeeds, and return what it printed."""
        code, out, err = self.run(text)
        assert (code, err) == (0, ""), err
        return out

    def json(self, text: str) -> Any:
        return json.loads(self.done(f"{text} --json"))

    def fails(self, text: str) -> str:
        """Run a command that is refused, and return why."""
        code, out, err = self.run(text)
        assert code in (1, 2, 3)
        assert out == ""
        assert "Traceback" not in err
        return err

    def file(self, text: str) -> str:
        """Return the name of a file with *text*."""
        path = self.directory.parent / "secret"
        path.write_text(f"{text}\n")
        path.chmod(0o600)
        return str(path)


@pytest.fixture(params=["files", "broker"])
def acl(request: pytest.FixtureRequest, martlet: Run, tmp_path: Path) -> Iterator[Acl]:
    found = Acl(martlet, tmp_path / "data")
    found.done("init")
    if request.param == "files":
        yield found
        return
    process = Process(tmp_path, "run", "--set", PLUGINS, "--set", "store.flush=async")
    try:
        process.addresses()
        process.until((tmp_path / "data" / "acl.sock").is_socket)
        yield found
        assert process.stop() == 0
    finally:
        process.end()


def names(rows: list[dict[str, Any]], key: str = "name") -> list[str]:
    return [row[key] for row in rows]


def test_users(acl: Acl) -> None:
    password = acl.file("a password")
    assert acl.done(f"user add alice --group shop --group staff --password-file {password}") == "user alice was added\n"
    assert "without a password" in acl.done("user add bob --administrator --no-password")
    rows = {row["name"]: row for row in acl.json("user list")}
    alice = {"name": "alice", "administrator": False, "disabled": False, "groups": ["shop", "staff"]}
    assert rows["alice"] == {**alice, "password": True, "keys": 0}
    assert rows["bob"]["administrator"]
    assert not rows["bob"]["password"]
    acl.done("user set alice --administrator --join more --leave shop --no-password")
    acl.done("user set bob --normal")
    acl.done("user disable bob")
    rows = {row["name"]: row for row in acl.json("user list")}
    assert rows["alice"]["groups"] == ["staff", "more"]
    assert (rows["alice"]["administrator"], rows["alice"]["password"]) == (True, False)
    assert (rows["bob"]["administrator"], rows["bob"]["disabled"]) == (False, True)
    acl.done("user enable bob")
    acl.done(f"user set bob --password-file {password}")
    assert re.search(r"bob +no +no +yes +0\n", acl.done("user list"))
    assert acl.done("user remove alice") == "user alice was removed, with keys, rules and quota\n"
    assert names(acl.json("user list")) == ["admin", "bob"]
    assert acl.fails("user remove alice") == "martlet: user 'alice' does not exist\n"
    assert "exists already" in acl.fails("user add bob --no-password")
    assert "nothing to change" in acl.fails("user set bob")
    assert "not allowed with argument" in acl.fails("user set bob --no-password --password")
    assert "control character" in acl.fails("user add 'a\tb' --no-password")


def test_groups(acl: Acl) -> None:
    assert acl.done("group add shop --in staff --in all") == "group shop is in staff, all\n"
    assert acl.done("group add staff") == "group staff is in no other group\n"
    assert acl.json("group list") == [
        {"name": "shop", "groups": ["staff", "all"]},
        {"name": "staff", "groups": []},
    ]

    assert "is in itself" in acl.fails("group add all --in shop")
    assert re.search(r"shop +staff, all\n", acl.done("group list"))
    acl.done("group remove staff")
    assert acl.json("group list") == [{"name": "shop", "groups": ["all"]}]


def test_quotas(acl: Acl) -> None:
    acl.done("user add alice --no-password")
    assert acl.done("quota set user:alice --messages-in 10 --refuses") == "user:alice: messages_in 10, refuses\n"
    assert acl.done("quota set user:alice --no-refuses --bytes-out 7") == "user:alice: messages_in 10, bytes_out 7\n"
    assert acl.done("quota set group:shop --connections 3 --subscriptions 4 --shared-groups 5") == (
        "group:shop: connections 3, subscriptions 4, shared_groups 5\n"
    )
    code, out, err = acl.run("quota set user:carol --messages-in 0")
    assert (code, out) == (0, "user:carol: no limits\n")
    assert err == "note: user 'carol' does not exist; the quota counts as soon as he does\n"
    limits = dict.fromkeys(LIMITS, 0) | {"messages_in": 10, "bytes_out": 7, "refuses": False}
    assert acl.json("quota list user:alice") == [{"subject": "user:alice", **limits}]
    assert acl.json("quota list user:bob") == []
    assert names(acl.json("quota list"), "subject") == ["user:alice", "group:shop", "user:carol"]
    assert re.search(r"group:shop  connections 3, subscriptions 4, shared_groups 5\n", acl.done("quota list"))
    stored = json.loads((acl.directory / "config" / "acl.json").read_text())["quotas"]
    assert stored["user:alice"] == {"messages_in": 10, "bytes_out": 7}
    assert acl.done("quota remove user:alice") == "user:alice: the quota was removed\n"
    assert acl.fails("quota remove user:alice") == "martlet: user:alice has no quota\n"
    assert acl.fails("quota set user:alice --bytes-in -1") == "martlet: bytes_in: Expected `int` >= 0\n"
    assert "subject 'alice' is unknown" in acl.fails("quota set alice --bytes-in 1")
    assert "there is nothing to change" in acl.fails("quota set user:alice")
    assert "invalid int value" in acl.fails("quota set user:alice --bytes-in 1k")


def test_keys(acl: Acl) -> None:
    acl.done("user add alice --no-password")
    made = acl.json("key add alice")
    assert (made["user"], made["access_key"], len(made["secret"])) == ("alice", "alice", 40)
    said = acl.done("key add alice --key alice-2")
    assert "user alice has the access key alice-2\n" in said
    assert re.search(r"shown only now: [0-9a-f]{40}\n", said)
    secret = acl.file("from a file")
    said = acl.done(f"key add alice --key alice-3 --secret-file {secret}")
    assert "from a file" not in said
    acl.done("key disable alice-2")
    assert acl.json("key list alice") == [
        {"user": "alice", "key": "alice", "disabled": False},
        {"user": "alice", "key": "alice-2", "disabled": True},
        {"user": "alice", "key": "alice-3", "disabled": False},
    ]
    acl.done("key enable alice-2")
    acl.done("key remove alice")
    assert names(acl.json("key list"), "key") == ["admin", "alice-2", "alice-3"]
    assert "alice-3" in acl.done("key list alice")
    assert "access key 'alice' does not exist" in acl.fails("key remove alice")
    assert "user 'bob' does not exist" in acl.fails("key list bob")
    assert "the secret has 5 characters" in acl.fails(f"key add alice --secret-file {acl.file('short')}")


def test_rules(acl: Acl) -> None:
    acl.done("user add alice --no-password")
    said = acl.done("allow user:alice publish,get 'topic:orders*' --from 10.0.0.0/8 --from fd00::1")
    assert said == "user:alice, custom: allow publish, get on topic:orders* from 10.0.0.0/8, fd00::1\n"
    acl.done("deny everybody all topic:orders-secret --default")
    acl.done("allow everybody publish 'name:mqtt/{user}/#'")
    code, _, err = acl.run("allow user:carol get topic:a")
    assert (code, err) == (0, "note: user 'carol' does not exist; the rule counts as soon as he does\n")
    rows = acl.json("list")
    assert names(rows, "subject") == ["user:alice", "everybody", "everybody", "user:carol"]
    assert acl.json("list user:alice") == [
        {
            "subject": "user:alice",
            "level": "custom",
            "decision": "allow",
            "actions": ["publish", "get"],
            "resource": "topic:orders*",
            "networks": ["10.0.0.0/8", "fd00::1"],
        }
    ]
    assert re.search(r"everybody +default +deny +all +topic:orders-secret\n", acl.done("list"))
    acl.done("remove everybody topic:orders-secret --default")
    assert "has no custom rule about 'topic:b'" in acl.fails("remove everybody topic:b")
    assert len(acl.json("list everybody")) == 1
    for wrong, part in (
        ("allow alice get topic:a", "subject 'alice' is unknown; write user:NAME"),
        ("allow user:alice read topic:a", "martlet: action 'read' is unknown"),
        ("allow user:alice get orders", "martlet: resource 'orders' has no kind"),
        ("allow user:alice get topic:a --from 10.0.0.0/x", "network '10.0.0.0/x'"),
        ("allow anonymous get 'topic:{user}'", "anonymous clients have no name"),
    ):
        assert part in acl.fails(wrong)


def test_explanations(acl: Acl) -> None:
    acl.done("user add alice --group shop --no-password")
    acl.done("allow group:shop publish 'topic:orders*' --from 10.0.0.0/8")
    acl.done("deny user:alice publish topic:orders-closed")
    said = acl.done("explain alice publish topic:orders-1 --from 10.1.2.3")
    assert said.startswith("alice may publish topic:orders-1 from 10.1.2.3\n")
    assert "rule    group shop, custom: allow publish on topic orders* from 10.0.0.0/8\n" in said
    assert "place   config/acl.json, rules of group:shop, custom rule 1\n" in said
    found = acl.json("explain alice publish topic:orders-1")
    assert (found["allowed"], found["considered"][0]["outcome"]) == (False, "other networks")
    assert acl.done("explain alice publish topic:orders-closed").startswith(
        "alice may not publish topic:orders-closed\n"
    )
    assert "does not exist" in acl.done("explain bob publish topic:a")
    assert "reason  no rule of anonymous matches" in acl.done("explain anonymous get cluster")
    assert "action 'read' is unknown" in acl.fails("explain alice read topic:a")


def test_the_two_steps_of_a_name_are_explained_under_a_heading_each(acl: Acl) -> None:
    acl.done("user add alice --no-password")
    acl.done("deny everybody publish topic:mqtt --default")
    acl.done("allow everybody all '*' --default")
    acl.done("allow user:alice publish name:mqtt/home/#")
    rule = "everybody   default  deny      publish  topic:mqtt "
    first, topic, name = acl.done("explain alice publish name:mqtt/home/door").split("\n\n")
    assert "rule    everybody, default: deny publish on topic mqtt\n" in first
    assert first.count("place   ") == 1  # the rule about the name is not asked
    assert topic.startswith("step 1, topic:mqtt: denied; this decides\nsubject")
    assert name.startswith("step 2, name:mqtt/home/door: allowed, but not asked because step 1 denies\nsubject")
    assert (topic.count(rule), name.count(rule)) == (1, 1)
    acl.done("remove everybody topic:mqtt --default")
    said = acl.done("explain alice publish name:mqtt/home/door")
    assert "step 1, topic:mqtt: allowed\n" in said
    assert "step 2, name:mqtt/home/door: allowed; this decides\n" in said
    said = acl.done("explain alice get name:mqtt/home/door")
    assert "step 1, topic:mqtt: allowed\n" in said
    acl.done("remove everybody '*' --default")
    said = acl.done("explain alice get name:mqtt/home/door")
    assert "step 2, name:mqtt/home/door: no rule matches\n" in said
    assert "step " not in acl.done("explain alice get topic:mqtt")


def test_observing(acl: Acl) -> None:
    assert acl.done("observe on").startswith("nothing is refused")
    assert "rules are only observed now" in acl.done("explain anonymous get cluster")
    if (acl.directory / "acl.sock").exists():
        assert "nothing would have been refused" in acl.done("observe")
        assert acl.json("observe report") == []
    else:
        assert "only a broker has a report" in acl.fails("observe report")
    assert acl.done("observe off") == "rules are enforced\n"


# the first administrator


def test_the_first_administrator_is_printed_once(martlet: Run, tmp_path: Path) -> None:
    acl = Acl(martlet, tmp_path / "data")
    said = acl.done("init")
    found = dict(re.findall(r"(?m)^  (user|password|access key|secret) +(\S+)$", said))
    assert (found["user"], found["access key"]) == ("admin", "admin")
    assert (len(found["password"]), len(found["secret"])) == (24, 40)
    assert 'enabled = ["remoting", "nameserver", "filter_sql92", "tx", "timer", "mqtt", "stomp", "acl"]' in said
    assert "has users and rules already" in acl.fails("init")
    secrets = (acl.directory / "config" / "acl.secrets").read_text()
    assert found["secret"] in secrets
    assert found["password"] not in secrets
    for name in ("acl.json", "acl.secrets", "acl.json.bak", "acl.secrets.bak"):
        assert (acl.directory / "config" / name).stat().st_mode & 0o077 == 0


def test_the_first_administrator_may_have_another_name_and_password(martlet: Run, tmp_path: Path) -> None:
    acl = Acl(martlet, tmp_path / "data")
    found = acl.json(f"init --user root --observe --password-file {acl.file('my own')}")
    assert (found["user"], found["observe"]) == ("root", True)
    assert "password" not in found
    assert json.loads((acl.directory / "config" / "acl.json").read_text())["observe"]
    assert "control character" in Acl(martlet, tmp_path / "other").fails("init --user 'a\tb'")


def test_the_data_directory_may_come_from_the_configuration(martlet: Run, tmp_path: Path) -> None:
    config = tmp_path / "martlet.toml"
    config.write_text(f'[broker]\ndata = "{tmp_path}/here"\n[acl]\npassword_cost = 13\n')
    code, _, err = martlet("acl", "init", "--config", str(config))
    assert (code, err) == (0, "")
    assert "ln=13," in (tmp_path / "here" / "config" / "acl.secrets").read_text()
    code, out, _ = martlet("acl", "user", "list", "--json", "--set", f"broker.data={tmp_path}/here")
    assert (code, names(json.loads(out))) == (0, ["admin"])


# what cannot be done


def test_without_files_the_command_says_what_to_do(martlet: Run, tmp_path: Path) -> None:
    assert "run `martlet acl init`" in Acl(martlet, tmp_path).fails("user list")
    assert "run `martlet acl init`" in Acl(martlet, tmp_path / "missing").fails("user list")


def test_files_with_errors_are_not_changed(martlet: Run, tmp_path: Path) -> None:
    acl = Acl(martlet, tmp_path / "data")
    acl.done("init")
    file = acl.directory / "config" / "acl.json"
    file.write_text(file.read_text().replace('"admin"', '"admin", "x": {"a": 1}, "b\\u0001"'))
    edited = file.read_text()
    said = acl.fails("user add bob --no-password")
    assert "config/acl.json: " in said
    assert file.read_text() == edited
    assert names(acl.json("user list")) == ["admin"]  # of the previous generation


def test_a_broker_without_the_plugin_is_named(martlet: Run, tmp_path: Path) -> None:
    acl = Acl(martlet, tmp_path / "data")
    process = Process(tmp_path, "run", "--set", "store.flush=async")
    try:
        process.addresses()
        acl.done("init")  # it needs no lock
        said = acl.fails("user list")
        assert f"is in use by process {process.child.pid}" in said
        assert "enable acl there" in said
    finally:
        process.end()


def test_a_password_is_not_taken_from_the_command_line_or_from_no_terminal(martlet: Run, tmp_path: Path) -> None:
    acl = Acl(martlet, tmp_path / "data")
    acl.done("init")
    assert "unrecognized arguments: hush" in acl.fails("user set admin --password hush")
    done = subprocess.run(
        [sys.executable, "-m", "martlet", "acl", "user", "add", "bob", "--data", str(acl.directory)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "add --password-file FILE, with - for stdin, or --no-password" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "martlet", "acl", "user", "add", "bob", "--password-file", "-", "--data", acl.directory],
        input="from stdin\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {row["name"]: row["password"] for row in acl.json("user list")}["bob"]


@pytest.mark.parametrize(("second", "part"), [("hush", "user bob was added"), ("other", "the passwords differ")])
def test_a_password_is_asked_for_at_the_terminal(martlet: Run, tmp_path: Path, second: str, part: str) -> None:
    acl = Acl(martlet, tmp_path / "data")
    acl.done("init")
    terminal, end = os.openpty()
    words = [sys.executable, "-m", "martlet", "acl", "user", "add", "bob", "--data", str(acl.directory)]
    with subprocess.Popen(words, stdin=end, stdout=end, stderr=end, start_new_session=True):
        os.close(end)
        said = b""
        for prompt, answer in ((b"Password of bob: ", "hush"), (b"Again: ", second)):
            while prompt not in said:
                said += os.read(terminal, 1024)
            os.write(terminal, f"{answer}\n".encode())
        while part.encode() not in said:
            said += os.read(terminal, 1024)
    os.close(terminal)
    assert b"hush" not in said


def test_help_names_every_command(martlet: Run) -> None:
    code, out, _ = martlet("acl", "--help")
    assert code == 0
    for name in ("init", "user", "group", "key", "allow", "deny", "list", "remove", "explain", "observe"):
        assert re.search(rf"(?m)^    {name} ", out), name


def test_files_of_other_brokers_are_imported(acl: Acl) -> None:
    folder = acl.directory.parent
    (folder / "acl.txt").write_text("user dora\ntopic readwrite home/#\ntopic deny home/safe\ntopic read a*\n")
    hashed = "$7$101$TDMSU3qLFrc8mJKp$" + "A" * 86 + "=="
    (folder / "passwords").write_text(f"dora:{hashed}\n")
    code, out, err = acl.run(f"import mosquitto-acl {folder / 'acl.txt'} --dry-run")
    assert (code, "acl.txt: line 4: 'a*' cannot be said" in err) == (0, True)
    assert "name:mqtt/home/safe" in out
    assert acl.json("list user:dora") == []

    assert acl.run(f"import mosquitto-acl {folder / 'acl.txt'}")[0] == 0
    assert acl.done(f"import mosquitto-passwords {folder / 'passwords'}") == "imported 1 users and 0 rules\n"
    rules = {(rule["decision"], rule["resource"]) for rule in acl.json("list user:dora")}
    assert rules == {("deny", "name:mqtt/home/safe"), ("allow", "name:mqtt/home/#")}
    [dora] = [user for user in acl.json("user list") if user["name"] == "dora"]
    assert dora["password"]

    code, _, err = acl.run(f"import mosquitto-acl {folder / 'acl.txt'}")
    assert "left out: user:dora has a custom rule about name:mqtt/home/# already" in err
    code, _, err = acl.run(f"import mosquitto-passwords {folder / 'passwords'}")
    assert "left out: user dora exists already" in err
    limited = [{"name": name, "limits": {"max-connections": 7}} for name in ("eric", "dora")]
    (folder / "rabbit.json").write_text(json.dumps({"users": limited}))
    assert re.search(r"eric +no +no +no +7\n", acl.done(f"import rabbitmq {folder / 'rabbit.json'} --dry-run"))
    assert acl.run(f"import rabbitmq {folder / 'rabbit.json'}")[:2] == (0, "imported 2 users and 0 rules\n")
    assert re.search(r"user:eric +connections 7\n$", acl.done("quota list"))
    assert acl.json("quota list user:dora") == [], "a user who exists stays as he is"

    assert "is no file of definitions" in acl.fails(f"import rabbitmq {folder / 'acl.txt'}")
    assert "cannot be read" in acl.fails(f"import rocketmq {folder / 'missing'}")
