"""The audit trail: one line an event, bounded, rotated, and never the reason that the broker stops."""

import json
import os
import stat
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from martlet.contracts import AccessEvent, Identity, LoginEvent, LoginOrigin, Question, Verdict
from martlet_acl.audit import WAITING_MAX, AuditFile, AuditTrail

HERE = LoginOrigin("10.1.2.3", "mqtt", "127.0.0.1:1883", "phone")
ANN = Identity("ann")


class Noon:
    def now_ms(self) -> int:
        return 1_800_000_000_123


def denied(name: str = "t") -> AccessEvent:
    return AccessEvent(Question(ANN, "publish", "topic", name, "10.1.2.3"), Verdict(allowed=False, rule="r"), "mqtt")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def written(trail: AuditTrail) -> None:
    """Run *trail*, which writes all events before it ends."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await trail.run()


async def test_each_event_is_a_line_with_who_where_what_and_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    trail = AuditTrail(AuditFile(str(path), 1 << 20, 2), Noon())
    trail.note_login(LoginEvent(HERE, "ann", "password", ANN))
    trail.note_login(LoginEvent(HERE, "eve\n", "password", None, "wrong password"))
    trail.note_access(denied())
    trail.note_access(AccessEvent(Question(ANN, "update", "cluster", ""), Verdict(allowed=True, rule="admin"), "stomp"))
    trail.note_change("root", "create user bob")
    await written(trail)
    login, refused, access, update, change = lines_of(path)
    assert login == {
        "time": "2027-01-15T08:00:00.123+00:00",
        "event": "login",
        "allowed": True,
        "identity": "ann",
        "user": "ann",
        "method": "password",
        "address": "10.1.2.3",
        "protocol": "mqtt",
        "client_id": "phone",
        "reason": "",
    }
    assert (refused["allowed"], refused["user"], refused["reason"]) == (False, "eve\n", "wrong password")
    assert (access["action"], access["resource"], access["rule"], access["allowed"]) == (
        "publish",
        "topic:t",
        "r",
        False,
    )
    assert (update["resource"], update["protocol"], update["allowed"]) == ("cluster", "stomp", True)
    assert (change["identity"], change["change"]) == ("root", "create user bob")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert trail.statistics() == {"written": 5, "waiting": 0, "dropped": 0}


async def test_texts_of_clients_are_cut_and_escaped(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    trail = AuditTrail(AuditFile(str(path), 1 << 20, 2), Noon())
    trail.note_login(LoginEvent(HERE, "x" * 70_000, "password", None, "\ud800\x00\u2028"))
    await written(trail)
    [line] = lines_of(path)
    assert (line["user"], line["reason"]) == ("x" * 256, "\ud800\x00\u2028")


async def test_events_beyond_the_bound_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    trail = AuditTrail(AuditFile(str(path), 1 << 30, 2), Noon())
    for _ in range(WAITING_MAX + 7):
        trail.note_access(denied())
    await written(trail)
    assert trail.statistics() == {"written": WAITING_MAX, "waiting": 0, "dropped": 7}


@pytest.mark.parametrize("older", [0, 1, 3])
def test_full_files_are_rotated_and_the_oldest_go(tmp_path: Path, older: int) -> None:
    path = tmp_path / "audit.log"
    file = AuditFile(str(path), 100, older)
    for number in range(6):
        file.append(b"%d" % number * 59 + b"\n")
    kept = {name.name: name.read_bytes()[:1] for name in sorted(tmp_path.iterdir())}
    assert kept == {
        "audit.log": b"5",
        **{f"audit.log.{number}": b"%d" % (5 - number) for number in range(1, older + 1)},
    }


def test_a_file_that_was_moved_away_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    file = AuditFile(str(path), 1 << 20, 1)
    file.append(b"1\n")
    path.rename(tmp_path / "elsewhere")
    file.append(b"2\n")
    assert path.read_bytes() == b"2\n"


async def test_a_file_that_cannot_be_written_costs_events_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    path = tmp_path / "missing" / "audit.log"
    trail = AuditTrail(AuditFile(str(path), 1 << 20, 1), Noon())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trail.run)
        for _ in range(3):
            trail.note_access(denied())
            await trio.sleep(1)
        assert trail.statistics() == {"written": 0, "waiting": 0, "dropped": 3}
        os.mkdir(path.parent)
        trail.note_access(denied())
        await trio.sleep(1)
        assert trail.statistics() == {"written": 1, "waiting": 0, "dropped": 3}
        nursery.cancel_scope.cancel()
    assert len([record for record in caplog.records if "audit trail cannot be written" in record.message]) == 1


async def test_a_topic_gets_the_same_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    published: list[tuple[str, bytes]] = []
    trail = AuditTrail(AuditFile(str(path), 1 << 20, 1), Noon(), published.extend)
    trail.note_access(denied())
    trail.note_change("root", "create user bob")
    await written(trail)
    assert [kind for kind, _ in published] == ["access", "change"]
    assert b"".join(line for _, line in published) == path.read_bytes()
