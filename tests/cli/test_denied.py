"""Commands of somebody without permissions: nothing happens, and nothing tells whether a topic or a group exists."""

import shlex
from collections.abc import Callable, Iterator

import pytest
from tests.acl.brokers import SECRET, write_files

from .conftest import Process

Run = Callable[..., tuple[int, str, str]]

COMMANDS = """
send TOPIC x
send TOPIC x --key k --tag t
tail TOPIC --from begin --no-follow
tail TOPIC --from 15m --no-follow --json
tail TOPIC --queue 0 --from 0 --count 1
tail TOPIC --from begin --no-follow --tag 'a || b'
tail TOPIC --from begin --no-follow --sql 'a > 1'
tail TOPIC
topic create TOPIC --queues 1
topic create TOPIC --queues 8
topic stats TOPIC
topic delete TOPIC --yes
group create GROUP --retries 1
group lag GROUP
group reset GROUP --topic TOPIC --to begin
group reset GROUP --topic TOPIC --queue 0 --to 0
group delete GROUP --yes
message --key k --topic TOPIC
message 7F00000100002A9F0000000000000000 --topic TOPIC
dlq show GROUP
dlq resend GROUP
"""
USERS = {"root": {"administrator": True}, "nobody": {}, "viewer": {}}
# The viewer gets further: to the topic or the group itself.
RULES = {"user:viewer": ["allow get on cluster"]}
LINES = COMMANDS.strip().splitlines()


@pytest.fixture(scope="module")
def name_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("denied")
    write_files(folder / "data", USERS, RULES)
    (folder / "data" / "config" / "acl.secrets").chmod(0o600)
    plugins = 'plugins.enabled=["remoting", "nameserver", "filter_sql92", "acl"]'
    process = Process(folder, "run", "--set", "store.flush=async", "--set", plugins)
    try:
        yield process.addresses()["nameserver"]
    finally:
        process.end()


def run_as(martlet: Run, name_server: str, user: str, line: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MARTLET_ACCESS_KEY", user)
        patch.setenv("MARTLET_SECRET", SECRET.format(user))
        patch.setenv("NAMESRV_ADDR", name_server)
        return martlet(*shlex.split(line))


@pytest.fixture
def root(martlet: Run, name_server: str) -> Callable[[str], str]:
    """Run a command as the administrator, and return what it prints."""

    def run(line: str) -> str:
        code, out, err = run_as(martlet, name_server, "root", line)
        assert code == 0, err
        return out

    return run


@pytest.fixture(scope="module")
def states() -> list[list[str]]:
    """The state before the first denied command, once it was prepared."""
    return []


def state(root: Callable[[str], str]) -> list[str]:
    return [root(line) for line in ("topic list --all", "topic stats orders", "group list", "group lag billing")]


@pytest.mark.parametrize("user", ["nobody", "viewer"])
@pytest.mark.parametrize("line", LINES)
def test_a_denied_command_does_nothing_and_tells_nothing(
    line: str, user: str, martlet: Run, name_server: str, root: Callable[[str], str], states: list[list[str]]
) -> None:
    if not states:
        root("topic create orders --queues 4")
        root("send orders secret --key k")
        root("group create billing")
        root("group reset billing --topic orders --to end")
        states.append(state(root))
    existing = line.replace("TOPIC", "orders").replace("GROUP", "billing")
    missing = line.replace("TOPIC", "wanted").replace("GROUP", "missing")
    code, out, err = run_as(martlet, name_server, user, existing)
    assert code != 0
    assert "secret" not in out
    assert "Traceback" not in err
    said = [each.replace("orders", "wanted").replace("billing", "missing") for each in (out, err)]
    assert (code, *said) == run_as(martlet, name_server, user, missing)
    assert state(root) == states[0]
