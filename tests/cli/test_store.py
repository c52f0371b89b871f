"""`martlet store` reads a directory that no broker has open, and finds what is wrong with it."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from martlet.app import saving
from martlet.app.config import Config
from martlet.app.startup import build
from martlet.cli.store import _time as shown_time
from martlet.message import Message, Placed
from martlet.offline.unfinished import unfinished_backup
from martlet.runtime.clock import SystemClock
from martlet.runtime.stats import Stats
from martlet.store import RealDisk, Store, StoreConfig

Run = Callable[..., tuple[int, str, str]]

RECORDS = 60
SIZES = {"segment_bytes": 8192, "page_bytes": 4096, "index_slots": 64, "index_entries": 1024}
SETTINGS = [word for name, value in SIZES.items() for word in ("--set", f"store.{name}={value}")]


def config() -> StoreConfig:
    return StoreConfig(**SIZES)  # type: ignore[arg-type]


def save_topics(store: Store) -> None:
    """Write the table of the topics that have records, as a broker does."""
    saving.save(build(Config(store=store.config), store, SystemClock(), Stats()))


def written(directory: Path, *, orderly: bool = True, body: bytes = b"") -> list[Placed]:
    """Make a store of some segments and return where its records are; stopped *orderly* or killed."""

    async def work() -> list[Placed]:
        store = await Store.open(directory, config(), SystemClock())
        async with trio.open_nursery() as nursery:
            await nursery.start(store.upkeep.run)
            placed = [
                store.writer.append(Message(f"Topic{number % 2}", body or b"body %d " % number * 20), number % 3)
                for number in range(RECORDS)
            ]
            store.committer.commit()
            await store.flusher.wait_flushed(placed[-1].end)
            nursery.cancel_scope.cancel()
        save_topics(store)
        if orderly:
            await store.close()
        else:
            await store.upkeep.checkpointer.checkpoint()
            store.crash()
        return placed

    return trio.run(work)


def flip(directory: Path, position: int) -> None:
    """Change one bit of the log."""
    start = max(int(path.name) for path in (directory / "commitlog").iterdir() if int(path.name) <= position)
    path = directory / "commitlog" / f"{start:020d}"
    data = bytearray(path.read_bytes())
    data[position - start] ^= 0x10
    path.write_bytes(data)


def verified(martlet: Run, directory: Path) -> tuple[int, Any]:
    code, out, _ = martlet("store", "verify", str(directory), "--json", *SETTINGS)
    return code, json.loads(out)


def test_inspect_counts_what_is_there(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    code, out, err = martlet("store", "inspect", str(tmp_path), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["stopped_in_order"]
    assert found["records"] == sum(segment["records"] for segment in found["segments"]) == RECORDS
    assert len(found["segments"]) > 1
    assert (found["log_start"], found["log_end"]) == (0, placed[-1].end)
    queues = {(queue["topic"], queue["queue_id"]): queue for queue in found["queues"]}
    assert len(queues) == 6
    assert all((queue["first_offset"], queue["next_offset"]) == (0, 10) for queue in queues.values())


def test_inspect_is_a_table_for_people(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path)
    code, out, _ = martlet("store", "inspect", str(tmp_path))
    assert code == 0
    assert f"{RECORDS} records" in out
    assert "Topic1" in out
    assert "clean shutdown" in out


def test_one_record_is_printed(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    code, out, _ = martlet("store", "inspect", str(tmp_path), "--at", str(placed[7].position), "--json")
    record = json.loads(out)
    assert code == 0
    assert record["body"].startswith("body 7 ")
    assert (record["topic"], record["queue"]) == ("Topic1", 1)


def test_a_binary_body_is_base64_in_json(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path, body=b"\xff\x00binary")
    at = ("store", "inspect", str(tmp_path), "--at", str(placed[7].position))
    record = json.loads(martlet(*at, "--json")[1])
    assert (record["body"], record["body_encoding"]) == ("/wBiaW5hcnk=", "base64")
    assert "\\xff\\x00binary" in martlet(*at)[1]


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, None),
        (1_700_000_000_123, "2023-11-14 23:13:20.123"),
        (1_690_000_000_123, "2023-07-22 06:26:40.123"),
        (1 << 62, str(1 << 62)),
    ],
)
def test_times_are_those_of_the_clock_on_the_wall(ms: int, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert shown_time(ms) == text
    finally:
        monkeypatch.undo()
        time.tzset()


def test_where_no_record_begins_is_said(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    for position in (placed[3].position + 1, placed[-1].end, 1 << 40):
        code, _, err = martlet("store", "inspect", str(tmp_path), "--at", str(position))
        assert code == 3
        assert f"position {position}" in err


def test_a_sound_store_is_verified(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path)
    code, found = verified(martlet, tmp_path)
    assert code == 0
    assert found["sound"]


@pytest.mark.parametrize("within", [0, 5, 32, 95])
def test_one_bit_costs_one_record_and_is_found(within: int, martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    hurt = placed[RECORDS // 2]
    flip(tmp_path, hurt.position + within)
    code, found = verified(martlet, tmp_path)
    assert code == 3
    assert not found["sound"]
    assert found["records"] == RECORDS - 1
    assert [(damage["start"], damage["end"]) for damage in found["damage"]] == [
        (hurt.position, placed[RECORDS // 2 + 1].position)
    ]


def kinds(found: Any) -> dict[str, int]:
    """How many findings there are of each kind."""
    return dict(Counter(finding["kind"] for finding in found["findings"]))


def test_a_queue_offset_that_does_not_follow_is_no_loss(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    flip(tmp_path, placed[RECORDS // 2].position + 24)  # no checksum guards the queue offset
    code, found = verified(martlet, tmp_path)
    assert code == 3
    assert kinds(found) == {"queue": 2}
    assert "Topic0/0" in found["findings"][0]["text"]


def test_a_wrong_queue_entry_is_found(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "consumequeue" / "Topic0" / "0" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[20 * 4 + 7] ^= 1
    path.write_bytes(data)
    code, found = verified(martlet, tmp_path)
    assert code == 3
    assert "Topic0/0" in found["findings"][0]["text"]


def test_a_torn_end_is_no_damage(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path, orderly=False)
    last = max((tmp_path / "commitlog").iterdir())
    data = bytearray(last.read_bytes())
    at = placed[-1].end - int(last.name)
    data[at : at + 40] = b"\x00\x00\x01" + b"x" * 37
    last.write_bytes(data)
    code, found = verified(martlet, tmp_path)
    assert code == 3
    assert not found["stopped_in_order"]
    assert not found["damage"]
    assert found["records"] == RECORDS
    assert [finding["text"] for finding in found["findings"]] == [
        f"the log ends at position {placed[-1].end} with 40 bytes of no record; removing them",
        f"a start changes commitlog/{last.name}",
    ]


def test_a_segment_that_ends_within_a_record_is_read_to_its_end(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    first = min((tmp_path / "commitlog").iterdir())
    cut = placed[5].position + 60
    first.write_bytes(first.read_bytes()[:cut])
    code, found = verified(martlet, tmp_path)
    assert code == 3
    assert found["damage"][0]["start"] == placed[5].position
    lost = [each for each in placed if placed[5].position <= each.position < SIZES["segment_bytes"]]
    assert found["records"] == RECORDS - len(lost)


def test_a_topic_that_was_deleted_and_created_again_is_sound(martlet: Run, tmp_path: Path) -> None:
    async def work() -> None:
        store = await Store.open(tmp_path, config(), SystemClock())
        for count in (10, 3):
            for number in range(count):
                store.writer.append(Message("Again", b"%d" % number, b"UNIQ_KEY\x01%d\x02" % number), 0)
            store.committer.commit()
            store.flusher.flush_now()
            if count == 10:
                store.deletions.delete_topic("Again")
        save_topics(store)
        await store.close()

    trio.run(work)
    code, found = verified(martlet, tmp_path)
    assert (code, found["findings"]) == (0, [])


def test_nothing_is_changed(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    martlet("store", "inspect", str(tmp_path))
    martlet("store", "verify", str(tmp_path))
    martlet("store", "repair", str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("action", ["inspect", "verify", "repair"])
def test_a_directory_in_use_is_refused(action: str, martlet: Run, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "abort").write_text("4711")
    holder = RealDisk().lock(str(tmp_path / "lock"))
    try:
        code, _, err = martlet("store", action, str(tmp_path))
    finally:
        os.close(holder)
    assert code == 3
    assert "is in use by process 4711; stop it first" in err


def test_what_is_no_data_directory_is_said(martlet: Run, tmp_path: Path) -> None:
    code, _, err = martlet("store", "inspect", str(tmp_path / "absent"))
    assert code == 3
    assert "holds no commitlog" in err


def broken(directory: Path) -> None:
    """A data directory without consume queues and index, which a start rebuilds."""
    written(directory)
    shutil.rmtree(directory / "consumequeue")
    shutil.rmtree(directory / "index")


def test_what_a_start_would_do_is_done_when_it_is_wished(martlet: Run, tmp_path: Path) -> None:
    broken(tmp_path)
    code, found = verified(martlet, tmp_path)
    assert code == 3
    code, out, _ = martlet("store", "repair", str(tmp_path), "--yes", *SETTINGS)
    assert code == 0
    assert "a start creates consumequeue/Topic0/0/" in out
    assert "every record is intact and can be served; a start changes nothing" in out
    code, found = verified(martlet, tmp_path)
    assert (code, found["findings"], found["records"]) == (0, [], RECORDS)


def test_without_a_terminal_nothing_is_repaired_unasked(martlet: Run, tmp_path: Path) -> None:
    broken(tmp_path)
    code, out, err = martlet("store", "repair", str(tmp_path), *SETTINGS)
    assert code == 2
    assert "a start creates consumequeue" in out
    assert "add --yes" in err
    assert not (tmp_path / "consumequeue").exists()


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), ("no\n", 1)])
def test_at_a_terminal_repair_asks(
    answer: str, code: int, martlet: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(tmp_path)
    monkeypatch.setattr("sys.stdin", terminal := io.StringIO(answer))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert martlet("store", "repair", str(tmp_path), *SETTINGS)[0] == code
    assert (tmp_path / "consumequeue").exists() is (code == 0)


def test_what_no_start_can_repair_is_left_and_said(martlet: Run, tmp_path: Path) -> None:
    placed = written(tmp_path)
    flip(tmp_path, placed[10].position + 95)
    shutil.rmtree(tmp_path / "consumequeue")
    code, out, _ = martlet("store", "repair", str(tmp_path), "--yes", "--json", *SETTINGS)
    told = json.loads(out)
    assert code == 3
    assert told["planned"]
    assert told["done"]
    assert {finding["kind"] for finding in told["left"]} == {"damage", "queue"}


def listed(directory: Path, martlet: Run) -> Any:
    found = json.loads(martlet("store", "inspect", str(directory), "--json")[1])
    return found["records"], found["queues"]


@pytest.mark.parametrize("orderly", [True, False])
def test_a_backup_is_verified_and_changes_nothing(orderly: bool, martlet: Run, tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "backups" / "monday"
    data.mkdir()
    written(data, orderly=orderly)
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    code, out, _ = martlet("store", "backup", str(data), str(target), *SETTINGS)
    assert (code, out.splitlines()[-1]) == (
        0,
        "verified  every record is intact and can be served; a start changes nothing",
    )
    assert f" to {target}" in out
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before
    assert listed(target, martlet) == listed(data, martlet)
    assert verified(martlet, target)[0] == 0
    assert {path.stat().st_mode & 0o077 for path in [target, *target.rglob("*")]} == {0}
    assert not target.with_name("monday.unfinished").exists()


@pytest.mark.parametrize("action", ["verify", "repair", "backup"])
def test_other_sizes_than_the_configured_ones_are_no_damage(action: str, martlet: Run, tmp_path: Path) -> None:
    """A store keeps the sizes that it was made with, so nobody has to name the broker's configuration."""
    store, target = tmp_path / "store", [str(tmp_path / "copy")] if action == "backup" else []
    written(store)
    code, out, _ = martlet("store", action, str(store), *target)
    last = "every record is intact and can be served; a start changes nothing"
    assert (code, out.splitlines()[-1].partition("  ")[2]) == (0, last)


def test_a_backup_of_a_damaged_store_says_so(martlet: Run, tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "copy"
    data.mkdir()
    placed = written(data)
    flip(data, placed[7].position + 100)
    code, out, _ = martlet("store", "backup", str(data), str(target), *SETTINGS, "--json")
    found = json.loads(out)
    assert (code, found["sound"], found["records"]) == (3, False, RECORDS - 1)
    assert {finding["kind"] for finding in found["findings"]} == {"damage", "queue"}
    assert target.is_dir()


@pytest.mark.parametrize("link", ["target", "source"])
def test_a_backup_does_not_go_into_its_own_source(link: str, martlet: Run, tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "link"
    written(data)
    other.symlink_to(data)
    source, target = (data, other / "copy") if link == "target" else (other, data / "copy")
    before = sorted(data.iterdir())
    code, _, err = martlet("store", "backup", str(source), str(target), *SETTINGS)
    assert (code, "is inside of the data directory; choose another place" in err) == (3, True)
    assert sorted(data.iterdir()) == before


def test_a_backup_replaces_nothing(martlet: Run, tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "copy"
    data.mkdir()
    written(data)
    target.mkdir()
    code, _, err = martlet("store", "backup", str(data), str(target))
    assert code == 3
    assert "exists; choose another target, or remove it" in err
    code, _, err = martlet("store", "backup", str(data), str(data / "copy"))
    assert code == 3
    assert "is inside of the data directory" in err
    code, _, err = martlet("store", "backup", str(tmp_path / "absent"), str(tmp_path / "other"))
    assert code == 3
    assert "holds no commitlog" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "data"]


# Sends itself a signal when the function WHERE of the backup is called.
INTERRUPTED = """
import signal, sys
from martlet.cli.main import main
from martlet.offline import backup

where, number = sys.argv[1], int(sys.argv[2])
inner = getattr(backup, where)

def interrupted(*arguments, **options):
    signal.raise_signal(number)
    return inner(*arguments, **options)

setattr(backup, where, interrupted)
sys.exit(main(sys.argv[3:]))
"""
WHERE = ["_walk", "repair", "verify"]


def cut_backup(where: str, number: signal.Signals, *words: str, ignores_ctrl_c: bool = False) -> tuple[int, str]:
    """Return exit code and stderr of a backup that gets the signal *number* in the function *where*."""

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may run the tests, has them ignore it
        if ignores_ctrl_c:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    command = [sys.executable, "-c", INTERRUPTED, where, str(int(number)), "store", "backup", *words, *SETTINGS]
    done = subprocess.run(command, preexec_fn=prepare, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
    ids=["SIGINT", "SIGTERM", "SIGHUP"],
)
def test_an_interrupted_backup_leaves_nothing(where: str, number: signal.Signals, code: int, tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "backups" / "may" / "monday"
    written(data)
    assert cut_backup(where, number, str(data), str(target)) == (code, "")
    assert sorted(tmp_path.iterdir()) == [data]


def test_sigterm_ends_a_backup_that_ignores_ctrl_c(tmp_path: Path) -> None:
    """As a shell starts the background jobs of a script."""
    data, target = tmp_path / "data", tmp_path / "copy"
    written(data)
    words = (str(data), str(target))
    assert cut_backup("_walk", signal.SIGTERM, *words, ignores_ctrl_c=True) == (-signal.SIGTERM, "")
    assert sorted(tmp_path.iterdir()) == [data]
    assert cut_backup("_walk", signal.SIGINT, *words, ignores_ctrl_c=True)[0] == 0
    assert target.is_dir()


@pytest.mark.parametrize("where", WHERE)
def test_a_backup_begins_again_after_a_kill(where: str, martlet: Run, tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "copy"
    written(data)
    assert cut_backup(where, signal.SIGKILL, str(data), str(target))[0] == -signal.SIGKILL
    assert target.with_name("copy.unfinished").is_dir()
    code, _, err = martlet("store", "backup", str(data), str(target), *SETTINGS)
    assert (code, err) == (0, "")
    assert listed(target, martlet) == listed(data, martlet)
    assert sorted(tmp_path.iterdir()) == [target, data]


def test_an_unfinished_backup_that_goes_on_is_left_alone(martlet: Run, tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "copy"
    written(data)
    with unfinished_backup(str(target), RealDisk()) as folder:
        (Path(folder) / "consumequeue").mkdir(parents=True)
        code, _, err = martlet("store", "backup", str(data), str(target), *SETTINGS)
        assert (code, "another process is making the backup" in err) == (3, True)
        assert os.listdir(folder) == ["consumequeue"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_no_unfinished_backup_is_not_touched(kind: str, martlet: Run, tmp_path: Path) -> None:
    data, target, other = tmp_path / "data", tmp_path / "copy", tmp_path / "copy.unfinished"
    written(data)
    if kind == "file":
        other.write_text("mine")
    elif kind == "link":
        other.symlink_to(data)
    else:
        (other / "copy").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = martlet("store", "backup", str(data), str(target), *SETTINGS)
    assert (code, "copy.unfinished' exists and is not an unfinished backup; choose another" in err) == (3, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_running_broker_is_backed_up_and_restored(martlet: Run, start: Callable[..., Any], tmp_path: Path) -> None:
    running = start("run", folder=tmp_path / "first")
    names = running.addresses()["nameserver"]
    for number in range(3):
        assert martlet("send", "Kept", f"message {number}", "--name-server", names)[0] == 0
    code, out, err = martlet("store", "backup", str(running.data), str(tmp_path / "copy"))
    assert code == 0, err
    assert out.splitlines()[-1].startswith("verified  every record is intact")
    assert martlet("send", "Kept", "later", "--name-server", names)[0] == 0
    assert running.stop() == 0
    folder = tmp_path / "second"
    folder.mkdir()
    shutil.copytree(tmp_path / "copy", folder / "data")
    restored = start("run", folder=folder)
    names = restored.addresses()["nameserver"]
    code, out, _ = martlet("tail", "Kept", "--from", "begin", "--no-follow", "--name-server", names)
    assert code == 0
    assert [f"message {number}" in out for number in range(3)] == [True] * 3
    assert "later" not in out
    assert restored.stop() == 0


NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def give_to_nobody(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


def owners(directory: Path) -> set[tuple[int, int]]:
    return {(path.stat().st_uid, path.stat().st_gid) for path in (directory, *directory.rglob("*"))}


@needs_root
@pytest.mark.parametrize(
    ("action", "code"), [(("repair", "--yes", *SETTINGS), 0), (("verify", *SETTINGS), 3), (("inspect",), 0)]
)
def test_a_directory_that_root_works_on_keeps_its_owner(
    action: tuple[str, ...], code: int, martlet: Run, tmp_path: Path
) -> None:
    broken(tmp_path)
    (tmp_path / "lock").unlink(missing_ok=True)
    give_to_nobody(tmp_path)
    assert martlet("store", action[0], str(tmp_path), *action[1:])[0] == code
    assert owners(tmp_path) == {(NOBODY, NOBODY)}


@needs_root
def test_a_backup_by_root_has_the_owner_of_the_original(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path / "store")
    give_to_nobody(tmp_path / "store")
    code, _, err = martlet("store", "backup", str(tmp_path / "store"), str(tmp_path / "copy"), *SETTINGS)
    assert code == 0, err
    assert owners(tmp_path / "copy") == {(NOBODY, NOBODY)}


@needs_root
def test_files_of_root_that_were_linked_into_the_directory_stay_his(martlet: Run, tmp_path: Path) -> None:
    written(tmp_path / "store")
    give_to_nobody(tmp_path / "store")
    (tmp_path / "secret").write_text("of root")
    os.link(tmp_path / "secret", tmp_path / "store" / "linked")
    (tmp_path / "store" / "soft").symlink_to(tmp_path / "secret")
    martlet("store", "repair", str(tmp_path / "store"), "--yes", *SETTINGS)
    assert (tmp_path / "secret").stat().st_uid == 0
