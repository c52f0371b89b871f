"""The socket in the data directory: requests, limits, and what is left of a killed broker."""

import json
import os
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.acl.brokers import AclBroker, acl_broker, write_files

from martlet.contracts import Identity, LoginOrigin
from martlet.errors import Refused
from martlet.net.unix_sockets import connect_unix, listen_unix
from martlet_acl import endpoint
from martlet_acl.answering import PAGE
from martlet_acl.config import AclConfig
from martlet_acl.endpoint import CONNECTIONS_MAX, LINE_BYTES_MAX, NAME
from martlet_acl.files import SECRETS
from martlet_acl.policy.quotas import StoredQuota
from martlet_acl.policy.rules import StoredRule, parse_rule

QUIET = AclConfig(watch_s=0, audit_file="")


class Talk:
    """One connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._data = b""

    async def line(self) -> Any:
        """Return the next answer; None if the broker has closed the connection."""
        while b"\n" not in self._data:
            try:
                more = await self.stream.receive_some(65536)
            except trio.BrokenResourceError:  # closed before it had read everything
                return None
            if not more:
                return None
            self._data += more
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)

    async def ask(self, request: str, **fields: object) -> Any:
        await self.stream.send_all(json.dumps({"request": request, **fields}).encode() + b"\n")
        return await self.line()

    async def rows(self, request: str, **fields: object) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        place: object = None
        while True:
            answer = await self.ask(request, place=place, **fields)
            rows += answer.get("rows", [])
            place = answer.get("place")
            if place is None:
                return rows


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Talk]:
    """A connection, once the broker listens."""
    while True:
        with suppress(OSError):
            stream = await trio.open_unix_socket(str(directory / NAME))
            break
        await trio.lowlevel.checkpoint()
    async with stream:
        yield Talk(stream)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[AclBroker]:
    write_files(tmp_path, {"root": {"administrator": True}, "alice": {}}, {"user:alice": ["allow get on topic:a"]})
    async with acl_broker(tmp_path, QUIET, protocols=False) as found:
        yield found


@pytest.fixture
async def talk(broker: AclBroker, tmp_path: Path) -> AsyncIterator[Talk]:
    async with opened(tmp_path) as found:
        yield found


async def test_changes_are_confirmed_when_they_are_on_disk(talk: Talk, broker: AclBroker, tmp_path: Path) -> None:
    assert await talk.ask("add user", name="bob", password="a password", groups=["g"]) == {}
    assert await talk.ask("put key", user="bob", key="k", secret="a secret of bob") == {}
    assert "a secret of bob" in (tmp_path / SECRETS).read_text()
    rule = {"decision": "allow", "actions": ["publish"], "resource": "topic:b", "networks": ["10.0.0.0/8"]}
    assert await talk.ask("put rule", subject="user:bob", **rule) == {}
    row = {"name": "bob", "administrator": False, "disabled": False, "groups": ["g"], "password": True, "keys": 1}
    assert (await talk.rows("list users"))[-1] == row
    assert await talk.rows("list keys", user="bob") == [{"user": "bob", "key": "k", "disabled": False}]
    assert await talk.rows("list rules", subject="user:bob") == [{"subject": "user:bob", "level": "custom", **rule}]
    assert await talk.ask("set user", name="bob", disabled=True, join=["h"], leave=["g"], password="") == {}
    row = {"name": "bob", "administrator": False, "disabled": True, "groups": ["h"], "password": False, "keys": 1}
    assert (await talk.rows("list users"))[-1] == row
    for request in ("remove rule", "remove rule"):
        answer = await talk.ask(request, subject="user:bob", resource="topic:b")
    assert answer == {"error": "user:bob has no custom rule about 'topic:b'", "reason": "not found"}


async def test_wrong_requests_are_answered_and_the_connection_goes_on(talk: Talk) -> None:
    for line in (b"junk", b"[]", b"{}", b'{"request": "fly"}', b'{"request": "add user"}', b"\xff", b"[" * 5000, b""):
        await talk.stream.send_all(line + b"\n")
        answer = await talk.line()
        assert answer["reason"] == "malformed"
        assert answer["error"].startswith("request is invalid; ")
    answer = await talk.ask("add user", name="alice")
    assert answer == {"error": "user 'alice' exists already", "reason": "illegal"}
    answer = await talk.ask("add user", name="bob", password=17)
    assert "Expected `str | null`, got `int`" in answer["error"]


@pytest.mark.parametrize("place", [[-1, 0], [0, -1], [-5, -5], [(1 << 53) + 1, 0], [1 << 80, 0], ["0", 0]])
async def test_a_place_that_is_none_is_refused(talk: Talk, place: list[object]) -> None:
    for request in ("list users", "list groups", "list keys", "list rules", "report"):
        assert (await talk.ask(request, place=place))["reason"] == "malformed"
    assert len((await talk.ask("list users"))["rows"]) == 2


async def test_a_place_after_the_end_has_no_rows(talk: Talk) -> None:
    for request in ("list users", "list groups", "list keys", "list rules", "report"):
        assert await talk.ask(request, place=[1 << 53, 7]) == {}


async def test_a_bug_costs_only_the_request(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("martlet_acl.answering._levels_and_rules", lambda policies, subject: 1 / 0)
    assert "bug" in (await talk.ask("list rules"))["error"]
    assert len((await talk.ask("list users"))["rows"]) == 2
    assert "ZeroDivisionError" in caplog.text


async def test_no_answer_shows_a_secret(talk: Talk) -> None:
    hidden = "hush, a secret"
    answers = [
        await talk.ask("add user", name="bob", password=hidden),
        await talk.ask("put key", user="bob", key="k", secret=hidden),
        await talk.ask("put key", user="bob", key="k\n", secret=hidden),
        await talk.ask("put key", user="bob", key="k", secret=hidden + "\n"),
        await talk.ask("add user", name="bob", password=hidden * 1000),
        await talk.ask("add user", name="bob", passwort=hidden),
        await talk.ask("put key", user="bob", key="k", secret=[hidden]),
        await talk.rows("list users"),
        await talk.rows("list keys"),
        await talk.ask("explain", user="bob", action="get", resource="topic:a"),
    ]
    assert hidden not in json.dumps(answers)
    assert "scrypt" not in json.dumps(answers)


async def test_long_lists_come_in_pages(talk: Talk, broker: AclBroker) -> None:
    policies = broker.state.policies
    for number in range(PAGE + 50):
        broker.state.put_user(f"user{number}", broker.state.users["alice"])
    (rule,) = policies.rules_of("user:alice", "custom")
    for number in range(2 * PAGE):
        policies.put_rule("group:g", "default", parse_rule(StoredRule(f"topic:t{number}", ("get",), "allow")))
        policies.put_rule(f"user:user{number}", "custom", rule)
        policies.quotas.put(f"user:user{number}", StoredQuota(messages_in=number))
    assert len(await talk.rows("list users")) == PAGE + 52
    assert [row["messages_in"] for row in await talk.rows("list quotas")] == [*range(2 * PAGE)]
    assert len(await talk.rows("list rules")) == 1 + 4 * PAGE
    assert len(await talk.rows("list rules", subject="group:g")) == 2 * PAGE
    first = await talk.ask("list rules")
    assert len(first["rows"]) == PAGE


async def test_a_line_that_is_too_long_ends_the_connection(talk: Talk) -> None:
    await talk.stream.send_all(b"x" * (LINE_BYTES_MAX + 65536 + 1))
    assert "is longer than" in (await talk.line())["error"]
    assert await talk.line() is None


async def test_the_number_of_connections_is_limited(broker: AclBroker, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            talk = await stack.enter_async_context(opened(tmp_path))
            assert await talk.rows("list groups") == []
        async with opened(tmp_path) as extra:
            assert (await extra.line())["error"] == f"{CONNECTIONS_MAX} commands are connected already; try again"
            assert await extra.line() is None
    while True:
        async with opened(tmp_path) as another:
            if "error" not in await another.ask("list groups"):
                break


async def test_a_silent_connection_gives_its_place_away(
    broker: AclBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "IDLE_S", 0.01)
    async with opened(tmp_path) as talk:
        assert await talk.line() is None


async def test_another_user_is_refused(broker: AclBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "peer_user", lambda connection: os.geteuid() + 1)
    async with opened(tmp_path) as talk:
        assert (await talk.line())["error"] == "only the user of the broker may do this"
        assert await talk.line() is None


async def test_the_socket_of_a_killed_broker_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    write_files(tmp_path, {"root": {}}, {})
    listen_unix(str(tmp_path / NAME)).close()
    async with acl_broker(tmp_path, QUIET, protocols=False), opened(tmp_path) as talk:
        assert len(await talk.rows("list users")) == 1
        assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / NAME).exists()


async def test_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    write_files(directory, {"root": {}}, {})

    def ask() -> bytes:
        with connect_unix(str(directory / NAME), 30.0) as connection:
            connection.sendall(b'{"request": "list users"}\n')
            return connection.recv(65536)

    async with acl_broker(directory, QUIET, protocols=False):
        while True:
            with suppress(OSError):
                data = await trio.to_thread.run_sync(ask)
                break
            await trio.lowlevel.checkpoint()
    assert json.loads(data)["rows"][0]["name"] == "root"


# explanations and reports


async def test_an_explanation_names_the_rule_and_its_place(talk: Talk) -> None:
    for subject, level, decision, resource in (
        ("everybody", "custom", "deny", "topic:a*"),
        ("everybody", "default", "allow", "*"),
        ("everybody", "custom", "allow", "topic:b"),
    ):
        await talk.ask("put rule", subject=subject, level=level, decision=decision, actions=["all"], resource=resource)
    answer = await talk.ask("explain", user="alice", action="get", resource="topic:a", address="10.0.0.1")
    verdict, *rules = answer["rows"]
    assert verdict == {
        "allowed": True,
        "rule": "user alice, custom: allow get on topic a",
        "reason": "",
        "subjects": ["user:alice", "everybody"],
        "observe": False,
        "user_exists": True,
        "steps": [{"about": "topic:a", "opinion": "allowed", "decides": True}],
    }
    assert [(rule["resource"], rule["outcome"]) for rule in rules] == [
        ("topic:a", "decides"),
        ("topic:a*", "matches, but another rule comes first"),
        ("*", "matches, but a custom rule decides"),
        ("topic:b", "other resource"),
    ]
    assert rules[0]["place"] == "config/acl.json, rules of user:alice, custom rule 1"
    assert rules[3]["place"] == "config/acl.json, rules of everybody, custom rule 2"
    answer = await talk.ask("explain", user="anonymous", action="publish", resource="name:mqtt/a")
    assert answer["rows"][0]["reason"] == "no rule of anonymous matches"
    answer = await talk.ask("explain", user="carol", action="publish", resource="shared:stomp/a")
    assert answer["rows"][0]["user_exists"] is False


@pytest.mark.parametrize(
    ("action", "resource", "part"),
    [
        ("read", "topic:a", "action 'read' is unknown"),
        ("get", "queue:a", "resource 'queue:a' is none"),
        ("get", "topic:", "resource 'topic:' is none"),
        ("get", "cluster:a", "resource 'cluster:a' is none"),
        ("get", "name:a", "has no topic; write name:TOPIC/NAME"),
        ("get", "name:/a", "resource 'name:/a' is none"),
        ("get", "name:a/", "resource 'name:a/' is none"),
        ("get", "shared:a", "resource 'shared:a' is none"),
        ("get", "topic:a/b", "what it names is name:a/b"),
        ("get", "topic:%RETRY%g", "what it names is group:g"),
        ("get", "topic:$share/a/b", "what it names is shared:a/b"),
        ("get", "group:", "resource 'group:' is none"),
        ("get", "", "resource '' is none"),
    ],
)
async def test_what_cannot_be_explained_is_said(talk: Talk, action: str, resource: str, part: str) -> None:
    answer = await talk.ask("explain", user="alice", action=action, resource=resource)
    assert part in answer["error"]
    assert answer["reason"] == "parameter"


@pytest.mark.parametrize(
    ("user", "address", "part"),
    [
        ("", "", "user '' has no name"),
        ("user:", "", "user 'user:' has no name"),
        ("alice", "nonsense", "address 'nonsense' is none"),
        ("alice", "10.0.0.0/8", "address '10.0.0.0/8' is none"),
    ],
)
async def test_who_cannot_be_explained_is_said(talk: Talk, user: str, address: str, part: str) -> None:
    answer = await talk.ask("explain", user=user, action="get", resource="topic:a", address=address)
    assert part in answer["error"]
    assert answer["reason"] == "parameter"


async def test_a_rule_that_never_counts_is_noted(talk: Talk) -> None:
    rule = {"subject": "user:alice", "decision": "deny", "actions": ["all"]}
    for resource, group in (("topic:%RETRY%g", "g"), ("topic:%RETRY%*", "*")):
        (row,) = (await talk.ask("put rule", **rule, resource=resource))["rows"]
        assert f"group:{group}" in row["note"]
    assert await talk.ask("put rule", **rule, resource="group:g") == {}


async def test_the_report_has_commands_that_allow_what_was_observed(talk: Talk, broker: AclBroker) -> None:
    for subject, resource in (("everybody", "topic:c"), ("everybody", "name:mqtt/c*"), ("everybody", "topic:closed")):
        await talk.ask("put rule", subject=subject, decision="deny", actions=["all"], resource=resource)
    await talk.ask(
        "put rule", subject="everybody", level="default", decision="deny", actions=["all"], resource="group:d"
    )
    assert await talk.ask("observe", observe=True) == {}
    gate = broker.broker.gate(Identity("alice"))
    asked = [
        ("publish", "b", "martlet acl allow user:alice publish topic:b"),
        ("publish", "c", "martlet acl remove everybody topic:c"),
        ("subscribe", "mqtt/c/d", "martlet acl allow user:alice subscribe name:mqtt/c/d"),
        ("publish", "closed/x", "martlet acl remove everybody topic:closed"),
        ("subscribe", "%RETRY%d", "martlet acl allow user:alice subscribe group:d"),
        ("get", "", "martlet acl allow user:alice get cluster"),
        ("publish", "mqtt/it's $5", "martlet acl allow user:alice publish 'name:mqtt/it'\"'\"'s $5'"),
        ("publish", "mqtt/a\nb", ""),
    ]
    for action, name, _ in asked:
        gate.check(action, name)  # type: ignore[arg-type]
    notes = broker.plugin.observations.note_login
    for user, method in (("alice", "password"), ("bob", "password"), ("bob", "signature"), ("alice", "certificate")):
        notes(user, method, "wrong")
    for user, method in (("alice", "token"), ("carol", "token"), ("-rf", "password")):
        notes(user, method, "wrong")
    rows = list(reversed(await talk.rows("report")))
    assert [row["command"] for row in rows] == [
        *(command for _, _, command in asked),
        "martlet acl user set alice --password",
        "martlet acl user add bob",
        "",
        "martlet acl user set alice --password",
        *["", "", ""],
    ]
    assert await talk.ask("observe", observe=True) == {}
    assert await talk.rows("report") == []


async def test_suggested_commands_do_not_undo_each_other_or_other_rules(talk: Talk, broker: AclBroker) -> None:
    """A rule replaces the one of the same subject on the same resource."""
    put = {"subject": "user:alice", "resource": "topic:b", "networks": ["10.0.0.0/8"]}
    await talk.ask("put rule", **put, decision="allow", actions=["create", "get"])
    await talk.ask("put rule", **{**put, "resource": "topic:d"}, decision="deny", actions=["subscribe"])
    await talk.ask("observe", observe=True)
    alice, anonymous = (broker.broker.gate(Identity(name), LoginOrigin("192.0.2.1")) for name in ("alice", ""))
    for gate, action, name in (
        (alice, "publish", "b"),
        (alice, "subscribe", "b"),
        (alice, "publish", "d"),
        (anonymous, "publish", "b"),
        (anonymous, "get", "b"),
    ):
        gate.check(action, name)  # type: ignore[arg-type]
    rows = await talk.rows("report")
    assert list(dict.fromkeys(row["command"] for row in rows)) == [
        "martlet acl allow anonymous publish,get topic:b",
        "martlet acl allow user:alice publish topic:d --default",
        "martlet acl allow user:alice publish,subscribe,create,get topic:b --from 10.0.0.0/8 --from 192.0.2.1",
    ]
    await talk.ask("put rule", **{**put, "resource": "topic:d", "level": "default"}, decision="deny", actions=["get"])
    assert next(row["command"] for row in await talk.rows("report") if row["name"] == "d") == ""


async def test_a_suggested_command_allows_what_was_observed(talk: Talk, broker: AclBroker) -> None:
    await talk.ask("put rule", subject="everybody", decision="deny", actions=["all"], resource="topic:c")
    await talk.ask("observe", observe=True)
    gate = broker.broker.gate(Identity("alice"))
    for name in ("b", "c", "mqtt/a/b"):
        gate.check("publish", name)
    words = [shlex.split(row["command"])[2:] for row in await talk.rows("report")]
    await talk.ask("observe", observe=False)
    for name in ("b", "c", "mqtt/a/b"):
        with pytest.raises(Refused):
            gate.check("publish", name)
    for action, *rest in words:
        if action == "allow":
            await talk.ask("put rule", subject=rest[0], decision="allow", actions=[rest[1]], resource=rest[2])
        else:
            await talk.ask("remove rule", subject=rest[0], resource=rest[1])
    gate.check("publish", "b")
    gate.check("publish", "mqtt/a/b")
    with pytest.raises(Refused):  # the rule that denied it is gone, and now none allows it
        gate.check("publish", "c")
