"""The upload process does its broker's work, and whatever becomes of it, nothing is lost and nothing is left behind."""

import logging
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from tests.cli.conftest import Process

from martlet_client import Message
from martlet_client.blocking import Producer
from martlet_tiered import errors
from martlet_tiered.errors import Fenced, LogUnreadable, RangeRefused, TierError, UploadProcessFailed
from martlet_tiered.upload import messages, process
from martlet_tiered.upload import uploader as uploading
from martlet_tiered.upload.messages import (
    AtWork,
    Failed,
    FindRange,
    LogLine,
    Opened,
    Reply,
    Setup,
    StoredRange,
    StoreRange,
    encode_message,
)
from martlet_tiered.upload.passing_errors import UploadDefect, failure_of, raised_by
from martlet_tiered.upload.process import UploadWorker, run_worker
from martlet_tiered.upload.worker import NICENESS

from .cold import Tier
from .stores import ENVIRON, Faulty
from .test_plugin import SETTINGS
from .uploads import Place, begin_upload, check_tier, filled_store, open_store, until, upload_all

# ReplyPipe to the requests for one range: opened, runs, found, spans, file, stored; and two of the next one.
STAGES: Final = 8


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for long in real time."""
    monkeypatch.setattr(uploading, "POLL_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_S", 0.005)
    monkeypatch.setattr(uploading, "BACKOFF_MAX_S", 0.02)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[trio.Process]:
    """All processes that were started."""
    found: list[trio.Process] = []
    open_process = trio.lowlevel.open_process

    async def open_one(*args: Any, **named: Any) -> trio.Process:
        found.append(await open_process(*args, **named))
        return found[-1]

    monkeypatch.setattr(trio.lowlevel, "open_process", open_one)
    return found


def at_reply(number: int, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call *call* before reply *number* is read, from 1 on; beats do not count."""
    left = [number]
    decode = messages.decode_reply

    def decode_one(data: bytes) -> Reply:
        reply = decode(data)
        if not isinstance(reply, AtWork | LogLine):
            left[0] -= 1
            if left[0] == 0:
                call()
        return reply

    monkeypatch.setattr(process, "decode_reply", decode_one)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


def children(pid: int) -> list[int]:
    """Return the processes that *pid* has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


# ---- the end of the process


@pytest.mark.parametrize("stage", range(1, STAGES + 1))
async def test_a_process_killed_at_any_stage_is_started_again(
    tmp_path: Path,
    local_tier: Tier,
    stage: int,
    started: list[trio.Process],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    at_reply(stage, lambda: started[0].kill(), monkeypatch)
    async with open_store(tmp_path) as store:
        filled_store(store, 25, topics=("T",))
        await upload_all(store, Place(local_tier, own_process=True))
        check_tier(local_tier, store)
    assert len(started) == 2
    assert f"the upload process {started[0].pid} was killed by signal 9 (SIGKILL); trying again" in caplog.text
    assert not any(is_running(each.pid) for each in started)


async def test_a_process_that_hangs_is_killed_after_its_deadline(
    tmp_path: Path,
    local_tier: Tier,
    started: list[trio.Process],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    at_reply(2, lambda: started[0].send_signal(signal.SIGSTOP), monkeypatch)
    run = process.run_worker

    def run_shortly(setup: Setup, deadline_s: float) -> Any:
        return run(setup, deadline_s if started else 3.0)

    monkeypatch.setattr("tests.tiered.uploads.run_worker", run_shortly)
    async with open_store(tmp_path) as store:
        filled_store(store, 25, topics=("T",))
        await upload_all(store, Place(local_tier, own_process=True))
        check_tier(local_tier, store)
    assert f"the upload process {started[0].pid} has said nothing for 3 s; it is killed" in caplog.text
    assert not any(is_running(each.pid) for each in started)


async def test_a_stop_ends_a_process_whose_put_hangs(
    tmp_path: Path, faulty: Faulty, faulty_tier: Tier, started: list[trio.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_reply(3, lambda: setattr(faulty, "silent", True), monkeypatch)  # found
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        async with begin_upload(store, Place(faulty_tier, own_process=True)):
            await until(lambda: faulty.silent and bool(faulty.connections))
            await trio.sleep(0.1)
        assert not is_running(started[0].pid)
        faulty.silent = False
        faulty.hang_up()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("-c", "raise SystemExit(3)"), "ended with exit code 3; what it wrote on the standard error says why"),
        (("-c", "import os; os.kill(os.getpid(), 11)"), "was killed by signal 11 (SIGSEGV)"),
        (("-c", "import os, sys; os.close(1); sys.stdin.read()"), "has closed its output"),
    ],
    ids=["exit", "crash", "closed"],
)
async def test_an_end_is_named(
    local_tier: Tier, command: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "COMMAND", command)
    monkeypatch.setattr(process, "KILL_S", 0.5)
    setup = Setup(local_tier.config(), {}, "/nowhere", "a", "u", 0, logging.INFO)
    with pytest.raises(UploadProcessFailed, match=r"the upload process [0-9]+ ") as caught:
        async with run_worker(setup, 60):
            pass
    assert str(caught.value).endswith(said)


async def test_a_process_that_cannot_be_started_is_a_failure(local_tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    setup = Setup(local_tier.config(), {}, "/nowhere", "a", "u", 0, logging.INFO)
    with pytest.raises(UploadProcessFailed, match="'/no/python' cannot be started: No such file"):
        async with run_worker(setup, 60):
            pass


async def test_a_process_without_ranges_ends_and_another_one_goes_on(
    tmp_path: Path, local_tier: Tier, started: list[trio.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "IDLE_S", 0.02)
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        async with begin_upload(store, Place(local_tier, own_process=True)) as held:
            await held.finish()
            await until(lambda: not is_running(started[0].pid))
            filled_store(store, 10, 10)
            await held.finish()
            assert held.uploader.progress.failures == 0
        check_tier(local_tier, store)
        assert len(started) == 2


def test_a_process_ends_with_its_broker_while_a_put_hangs(tmp_path: Path, faulty: Faulty, faulty_tier: Tier) -> None:
    faulty.silent = True
    (tmp_path / "commitlog").mkdir()
    place = faulty_tier.location().options
    setup = Setup(faulty_tier.config(), place, str(tmp_path / "commitlog"), "a", "u", 0, logging.INFO)
    with subprocess.Popen([sys.executable, *process.COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        worker.stdin.write(encode_message(setup))
        worker.stdin.flush()
        trio.run(until, lambda: bool(faulty.connections))
        worker.stdin.close()
        assert worker.wait() == 0
    faulty.silent = False
    faulty.hang_up()


def test_a_broker_killed_leaves_no_process_and_no_secret_in_sight(tmp_path: Path, s3_tier: Tier) -> None:
    settings = [*SETTINGS, f"tiered.url={s3_tier.url}", f"tiered.endpoint={s3_tier.settings['endpoint']}"]
    words = [word for each in settings for word in ("--set", each)]
    broker = Process(tmp_path, "run", *words, environment=s3_tier.environ)
    try:
        with Producer(broker.addresses()["nameserver"], "producers") as producer:
            producer.send(Message("T", b"body"))
        broker.until(lambda: bool(children(broker.child.pid)))
        (worker,) = children(broker.child.pid)
        line = Path(f"/proc/{worker}/cmdline").read_bytes()
        assert b"martlet_tiered.upload.worker" in line
        assert not any(secret.encode() in line for secret in ENVIRON.values())
        broker.until(lambda: os.getpriority(os.PRIO_PROCESS, worker) == NICENESS)
        broker.child.kill()
        trio.run(until, lambda: not is_running(worker))
    finally:
        broker.end()


# ---- messages


class Told:
    """A transport with these replies."""

    def __init__(self, *replies: Reply) -> None:
        self._replies = [encode_message(each)[4:] for each in replies]

    async def send(self, data: bytes) -> None:
        pass

    async def receive(self) -> bytes:
        return self._replies.pop(0)


NUMBERED: Final = (Fenced("owner", 7), RangeRefused("end", 9), RangeRefused("none", None))
PLAIN: Final = [
    kind("said")
    for kind in TierError.__subclasses__()
    if kind not in (Fenced, RangeRefused, UploadProcessFailed) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", [*NUMBERED, *PLAIN, TierError("any")], ids=lambda error: type(error).__name__)
async def test_an_error_keeps_its_class(error: TierError) -> None:
    with pytest.raises(type(error)) as caught:
        await UploadWorker(Told(failure_of(error))).store(StoreRange(1, 0, b"", None))
    assert type(caught.value) is type(error)
    assert (str(caught.value), vars(caught.value)) == (str(error), vars(error))


def test_an_error_of_the_disk_keeps_its_number_and_path() -> None:
    again = raised_by(failure_of(OSError(5, "Input/output error", "/log/0")))
    assert isinstance(again, OSError)
    assert (again.errno, again.filename) == (5, "/log/0")


def test_a_defect_has_its_traceback() -> None:
    try:
        raise KeyError("lost")
    except KeyError as error:
        again = raised_by(failure_of(error))
    assert isinstance(again, UploadDefect)
    assert str(again) == "KeyError: 'lost'"
    assert "test_upload_process.py" in str(again.__cause__)


async def test_lines_of_the_log_are_the_brokers(caplog: pytest.LogCaptureFixture) -> None:
    line = LogLine("martlet.tiered", logging.WARNING, "100 % of it")
    await UploadWorker(Told(AtWork(), line, Opened())).open(Setup(None, {}, "", "", "", 0, 0))  # type: ignore[arg-type]
    assert caplog.record_tuples == [("martlet.tiered", logging.WARNING, "100 % of it")]


async def test_an_answer_to_something_else_is_refused() -> None:
    with pytest.raises(UploadProcessFailed, match="answers StoredRange, which is no answer to its request"):
        await UploadWorker(Told(StoredRange(1))).find(FindRange([], 0, 1, 1, 1))


def test_a_message_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "FRAME_BYTES_MAX", 100)
    encode_message(Failed("TierError", "x" * 30))
    with pytest.raises(ValueError, match="is longer than 100"):
        encode_message(Failed("TierError", "x" * 100))


def test_a_setup_shows_no_secret(local_tier: Tier) -> None:
    assert "hidden" not in repr(Setup(local_tier.config(), {"key": "hidden"}, "/log", "a", "u", 0, 0))


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
async def test_a_file_of_the_log_that_is_gone_is_an_unreadable_log(
    tmp_path: Path, local_tier: Tier, own_process: bool
) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 10)
        begin = store.durable
        async with Place(local_tier, own_process=own_process).worker(store)(60) as worker:
            with pytest.raises(LogUnreadable, match=r"of the log is gone; retention has removed it"):
                await worker.find(
                    FindRange([(begin + (1 << 30), begin + (2 << 30))], begin + (1 << 30), 2 << 30, 1000, 9)
                )
            last = store.segments.items[-1]
            found, runs = await worker.find(FindRange([(last.start, last.end)], last.start, store.durable, 1000, 9))
            store.segments.files.disk.unlink(last.path)
            wanted = StoreRange(1, 0, array("q", [0] * len(runs)).tobytes(), None)
            stored, _, _ = await worker.store(wanted)  # it has the file open
            assert stored.records > 0
            assert found.end > last.start
            with pytest.raises(LogUnreadable, match=r"of the log is gone"):
                await worker.find(FindRange([(last.start, last.end)], last.start, store.durable, 1000, 9))
