"""A broker that changes its users and rules until it is killed; run by `test_kill` in a process of its own.

Two users are changed at once, one by commands through the socket, the other by requests of RocketMQ's admin tool. Each
goes through its steps again and again.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import trio
from tests.acl.brokers import SECRET, AclBroker, acl_broker, signed

from martlet_acl.config import AclConfig
from martlet_acl.endpoint import NAME
from martlet_acl.passwords import COST_MIN
from martlet_acl.policy.policies import LEVELS
from martlet_acl.state import AclState
from martlet_remoting.wire.codes import RequestCode

__all__ = ["STEPS", "live"]

Change = Mapping[str, object]
Step = tuple[Change, set[str]]  # a change, and what is known of the user after it
QUIET: Final = AclConfig(watch_s=0, audit_file="", password_cost=COST_MIN)


def _rule(level: str, resource: str) -> dict[str, object]:
    entry = {"resource": resource, "actions": ["Pub"], "decision": "Allow"}
    return {"subject": "User:asked", "policies": [{"policyType": level, "entries": [entry]}]}


def _command(request: str, **fields: object) -> dict[str, object]:
    return {"request": request, **fields}


def _request(code: int, body: object = None, **ext: str) -> dict[str, object]:
    return {"code": code, "ext": ext, "body": body}


OPEN: Final = {"decision": "allow", "actions": ["all"]}
COMMANDS: Final[list[Step]] = [
    (_command("add user", name="told", groups=["staff"]), {"user", "in staff"}),
    (_command("put key", user="told", key="k", secret="a secret"), {"user", "in staff", "key k"}),
    (
        _command("put rule", subject="user:told", resource="topic:a", **OPEN),
        {"user", "in staff", "key k", "custom topic:a"},
    ),
    (_command("set user", name="told", leave=["staff"]), {"user", "key k", "custom topic:a"}),
    (
        _command("put rule", subject="user:told", resource="*", level="default", **OPEN),
        {"user", "key k", "custom topic:a", "default *"},
    ),
    (
        _command("switch key", key="k", disabled=True),
        {"user", "key k is disabled", "custom topic:a", "default *"},
    ),
    (_command("remove rule", subject="user:told", resource="topic:a"), {"user", "key k is disabled", "default *"}),
    (_command("set user", name="told", disabled=True), {"disabled user", "key k is disabled", "default *"}),
    (_command("remove key", key="k"), {"disabled user", "default *"}),
    (_command("remove user", name="told"), set()),
]
REQUESTS: Final[list[Step]] = [
    (
        _request(RequestCode.AUTH_CREATE_USER, {"password": "a secret"}, username="asked"),
        {"user", "password", "key asked"},
    ),
    (
        _request(RequestCode.AUTH_CREATE_ACL, _rule("Custom", "Topic:a"), subject="User:asked"),
        {"user", "password", "key asked", "custom topic:a"},
    ),
    (
        _request(RequestCode.AUTH_CREATE_ACL, _rule("Default", "Topic:b*"), subject="User:asked"),
        {"user", "password", "key asked", "custom topic:a", "default topic:b*"},
    ),
    (
        _request(RequestCode.AUTH_UPDATE_USER, {"userStatus": "disable"}, username="asked"),
        {"disabled user", "password", "key asked", "custom topic:a", "default topic:b*"},
    ),
    (
        _request(RequestCode.AUTH_DELETE_ACL, subject="User:asked"),
        {"disabled user", "password", "key asked"},
    ),
    (_request(RequestCode.AUTH_DELETE_USER, username="asked"), set()),
]
STEPS: Final = {"told": COMMANDS, "asked": REQUESTS}


def live(directory: Path, pipe: Connection) -> None:
    """Tell what is known of each user; receive the numbers of their steps done, and go on; tell each one confirmed."""
    trio.run(_live, directory, pipe)


async def _live(directory: Path, pipe: Connection) -> None:
    async with acl_broker(directory, QUIET) as broker:
        pipe.send({user: _known(broker.state, user) for user in STEPS})
        numbers: dict[str, int] = pipe.recv()
        async with trio.open_nursery() as nursery:
            for user, ask in (("told", await _commands(directory)), ("asked", _requests(broker))):
                nursery.start_soon(_change, pipe, user, numbers[user], ask)


def _known(state: AclState, name: str) -> set[str]:
    known = {
        f"{level} {rule.resource.text}" for level in LEVELS for rule in state.policies.rules_of(f"user:{name}", level)
    }
    user, secrets = state.users.get(name), state.secrets_of(name)
    if user is not None:
        known.add("disabled user" if user.disabled else "user")
        known.update(f"in {group}" for group in user.groups)
    known.update(f"key {key}" + " is disabled" * secret.disabled for key, secret in secrets.keys.items())
    return known | ({"password"} if secrets.password else set())


async def _change(pipe: Connection, user: str, number: int, ask: Callable[[Change], Awaitable[object]]) -> None:
    steps = STEPS[user]
    while True:
        await ask(steps[number % len(steps)][0])
        pipe.send(user)
        number += 1


async def _commands(directory: Path) -> Callable[[Change], Awaitable[object]]:
    stream: trio.SocketStream | None = None
    while stream is None:  # until the socket is made; there may be one that a killed broker has left
        with suppress(OSError):
            stream = await trio.open_unix_socket(str(directory / NAME))
        await trio.lowlevel.checkpoint()

    async def ask(change: Change) -> None:
        await stream.send_all(json.dumps(change).encode() + b"\n")
        answer = await stream.receive_some()
        assert json.loads(answer) in ({}, {"rows": []}), answer

    return ask


def _requests(broker: AclBroker) -> Callable[[Change], Awaitable[object]]:
    talk = broker.remoting()

    async def ask(change: Mapping[str, Any]) -> None:
        body = json.dumps(change["body"]).encode() if change["body"] else b""
        ext = signed(change["ext"], body, "root", SECRET.format("root"))
        answer = await talk.ask(change["code"], ext, body)
        assert answer.code == 0, answer

    return ask
