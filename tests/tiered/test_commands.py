"""The commands ``martlet tiered ...`` say what a cold tier has and what is damaged, and rebuild what they can."""

import json
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import trio
from deltalake import DeltaTable

from martlet.cli.main import main
from martlet.errors import StoreFailed
from martlet.store.disk.data_directory import lock_directory
from martlet.store.disk.files import RealDisk
from martlet.testing.stores import message
from martlet_client import Message
from martlet_client.blocking import Producer, PullConsumer
from martlet_tiered.format.footer import footer_of
from martlet_tiered.reading.database import IndexDatabase
from martlet_tiered.reading.index import identity_of
from martlet_tiered.status import NAME, PurgeStatus, StatusSocket, TierStatus, read_status, request_purge

from .cold import Tier
from .histories import DAY, History, make_history
from .test_plugin import BODIES, first_segment, running
from .test_plugin import history as read_history
from .uploads import Place, fill, open_store, until, upload_all

Told = tuple[int, str, str]
Command = Callable[..., Told]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return make_history(tmp_path / "cold")


@pytest.fixture
def tiered(capsys: pytest.CaptureFixture[str], history: History) -> Command:
    """Runs a command on the tier; returns its exit code, what it printed, and its errors."""

    def run(*words: str, url: str = history.url.removesuffix("/table")) -> Told:
        code = main(["tiered", *words, *(["--url", url] if url else [])])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line]


def test_ls_lists_days_topics_and_queues(tiered: Command, history: History) -> None:
    code, text, _ = tiered("ls")
    head, _, days = text.partition("\n\n")
    assert code == 0
    assert "2 files" in head
    assert "of broker 'broker-a', up to log position " in head
    assert lines(days)[1][:4] == [DAY, "topic", "2", "3,000"]
    _, text, _ = tiered("ls", "--topics")
    assert [row[:4] for row in lines(text)[2:]] == [["Bills", "topic", "4", "1,500"], ["Orders", "topic", "4", "1,500"]]
    _, text, _ = tiered("ls", "--topic", "Orders")
    assert [row[:4] for row in lines(text)[2:]] == [[str(queue), "375", "0", "374"] for queue in range(4)]
    assert lines(text)[2][4] == DAY


def test_ls_prints_json(tiered: Command, history: History) -> None:
    _, text, _ = tiered("ls", "--topics", "--json")
    told = json.loads(text)
    assert (told["broker"], told["epoch"]) == ("broker-a", 1)
    last = history.messages[-1].record
    assert told["end_position"] > last.position
    assert told["rows"][1] == {
        "topic": "Orders",
        "kind": "topic",
        "queues": 4,
        "messages": 1500,
        "first_stored": history.of("Orders")[0].record.store_ms,
        "last_stored": history.of("Orders")[-1].record.store_ms,
    }


def test_the_place_comes_from_the_configuration(tiered: Command, history: History, tmp_path: Path) -> None:
    file = tmp_path / "martlet.toml"
    file.write_text(f'[broker]\nname = "broker-a"\n\n[tiered]\nurl = "{history.url.removesuffix("/table")}"\n')
    code, text, _ = tiered("ls", "--config", str(file), url="")
    assert code == 0
    assert "2 files" in text
    assert tiered("ls", "--set", f"tiered.url={history.url.removesuffix('/table')}", url="")[1] == text


def test_verify_finds_no_damage_in_what_was_uploaded(tiered: Command) -> None:
    code, text, _ = tiered("verify")
    assert code == 0
    assert "2 files" in text
    assert "with 3,000 intact records; no damage was found" in text
    assert "0 files" in tiered("verify", "--date", "2020-01-01")[1]


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "text", "intact"),
    [
        (lambda file, keys: flip(file, 2000), "row group 0", 1500),
        (lambda file, keys: flip(file, -2), "does not end as a Parquet file does", 1500),
        (lambda file, keys: file.unlink(), "does not exist", 1500),
        (lambda file, keys: flip(keys, 30), "its keys: an index of keys does not match its CRC", 3000),
        (lambda file, keys: keys.unlink(), "its keys: ", 3000),
    ],
)
def test_verify_names_each_damaged_file(
    tiered: Command, history: History, damage: Callable[[Path, Path], None], text: str, intact: int
) -> None:
    table = Path(history.url)
    file = min(table.rglob("*.parquet"))
    path = file.relative_to(table)
    damage(file, table.parent / "index" / f"{path}.keys")
    code, told, _ = tiered("verify")
    assert code == 1
    problem, *_, last = told.splitlines()
    assert problem.startswith(f"{path}: ")
    assert text in problem
    assert f"with {intact:,} intact records; 1 files are damaged" in last
    found = json.loads(tiered("verify", "--json")[1])
    assert list(found["damaged"]) == [str(path)]
    assert found["records"] == intact


def test_commands_change_nothing(tiered: Command, history: History) -> None:
    def seen() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in Path(history.url).parent.rglob("*") if file.is_file()}

    log = max((Path(history.url) / "_delta_log").iterdir())
    before = seen()
    tiered("verify")
    tiered("ls", "--topics")
    assert seen() == before
    flip(log, 0)  # as a power cut may leave it
    before = seen()
    tiered("ls")
    assert seen() == before


def test_status_says_how_far_the_table_is(tiered: Command, history: History) -> None:
    code, text, _ = tiered("status")
    assert code == 0
    told = {line[:10].strip(): line[10:] for line in text.splitlines()}
    assert told["table"].endswith("of broker 'broker-a', version 3")
    assert told["owner"].startswith("epoch 1, ")
    assert "; last commit 20" in told["uploaded"]
    assert told["files"].endswith("and 3,000 records (2 topic)")
    assert told["broker"] == "unknown; give --data or --config to ask it"
    found = json.loads(tiered("status", "--json", "--data", "nowhere")[1])
    assert found["running"] is None
    assert found["records"] == 3000
    assert found["end_position"] > history.messages[-1].record.position
    assert found["last_commit_ms"] > 1_700_000_000_000


def test_status_tells_what_a_running_broker_says(
    tmp_path: Path, local_tier: Tier, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(*words: str) -> str:
        assert main(["tiered", "status", "--url", local_tier.url, "--data", str(tmp_path / "data"), *words]) == 0
        return capsys.readouterr().out

    with running(tmp_path, local_tier) as (name_server, process):
        with Producer(name_server, "producers") as producer:
            for body in BODIES:
                producer.send(Message("T", body))
        process.until(lambda: first_segment(process) >= 65536 * 3)
        process.until(lambda: json.loads(status("--json"))["running"]["behind_bytes"] == 0)
        found = json.loads(status("--json"))
        assert found["running"]["position"] == found["end_position"]
        assert found["running"]["counters"]["upload_records"] >= len(BODIES)
        assert "nothing: all durable messages are uploaded" in status()
    assert f"none runs with {tmp_path / 'data'}" in status()
    assert not (tmp_path / "data" / NAME).exists()


def test_the_socket_of_a_killed_broker_is_no_broker(tiered: Command, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / NAME))
    code, text, _ = tiered("status", "--data", str(tmp_path))
    assert code == 0
    assert f"none runs with {tmp_path}" in text


def test_a_broker_with_an_unknown_answer_is_named(tiered: Command, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / NAME))
        listener.listen()

        def hang_up() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1000)

        thread = threading.Thread(target=hang_up)
        thread.start()
        code, _, error = tiered("status", "--data", str(tmp_path))
        thread.join()
    assert code == 3
    assert "gave an answer that cannot be understood" in error


def test_rebuild_makes_missing_and_damaged_keys_again(tiered: Command, history: History) -> None:
    root = Path(history.url).parent
    keys = sorted(root.rglob("*.keys"))
    before = [file.read_bytes() for file in keys]
    assert "keys   of 0 files were rebuilt, 2 needed nothing" in tiered("rebuild", "--all")[1]
    flip(keys[0], 30)
    keys[1].unlink()
    code, text, _ = tiered("rebuild")
    assert code == 0
    assert "keys   of 2 files were rebuilt, 0 needed nothing" in text
    assert [file.read_bytes() for file in keys] == before
    keys[0].chmod(0o600)
    keys[0].write_bytes(before[1])  # intact, and of another file
    assert "keys   of 0 files" in tiered("rebuild")[1]
    assert "keys   of 1 files" in tiered("rebuild", "--all")[1]
    assert keys[0].read_bytes() == before[0]


def test_rebuild_names_damaged_files(tiered: Command, history: History) -> None:
    file = min(Path(history.url).rglob("*.parquet"))
    flip(file, -2)
    code, text, _ = tiered("rebuild", "--all")
    assert code == 1
    assert text.splitlines()[0].startswith(f"{file.relative_to(history.url)}: ")
    assert "does not end as a Parquet file does" in text


def test_rebuild_leaves_the_index_to_a_running_broker(tiered: Command, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert "is no data directory" in tiered("rebuild", "--data", str(data))[2]
    (data / "commitlog").mkdir(parents=True)
    disk = RealDisk()
    lock = lock_directory(str(data), disk)
    assert "was left to the broker, which runs" in tiered("rebuild", "--data", str(data))[1]
    assert not (data / "config").exists()
    disk.close(lock)


def test_rebuild_makes_the_index_of_a_stopped_broker(tiered: Command, history: History, tmp_path: Path) -> None:
    data, url = tmp_path / "data", str(Path(history.url).parent)
    (data / "commitlog").mkdir(parents=True)
    code, text, _ = tiered("rebuild", "--data", str(data))
    assert code == 0
    assert f"index  {data}/config/tiered.index was rebuilt from 2 files" in text
    index = IndexDatabase(str(data / "config/tiered.index"), identity_of(url, "broker-a"))
    assert index.open()
    assert len(index.files()) == 2
    assert index.first_offsets() == [(topic, queue, 0) for topic in ("Bills", "Orders") for queue in range(4)]
    assert index.end_of("Orders", 3) == 375
    index.close()


def test_a_broker_reads_with_a_rebuilt_index(tmp_path: Path, local_tier: Tier) -> None:
    with running(tmp_path, local_tier) as (name_server, process):
        with Producer(name_server, "producers") as producer:
            for body in BODIES:
                producer.send(Message("T", body))
        process.until(lambda: first_segment(process) >= 65536 * 3)
    index = tmp_path / "data/config/tiered.index"
    flip(index, 5000)
    assert main(["tiered", "rebuild", "--url", local_tier.url, "--data", str(tmp_path / "data")]) == 0
    with running(tmp_path, local_tier) as (name_server, process):
        assert read_history(name_server) == BODIES
    log = process.log.read_text()
    assert "the cold tier has no index" not in log
    assert "the index of the cold tier is damaged" not in log


def test_wrong_places_are_named(tiered: Command, tmp_path: Path) -> None:
    code, _, error = tiered("ls", url="")
    assert code == 2
    assert "no place is given; use --config FILE with tiered.url in it, or --url URL" in error
    code, _, error = tiered("ls", url=str(tmp_path / "nothing"))
    assert code == 1
    assert "there is no table at " in error
    assert not (tmp_path / "nothing").exists()
    code, _, error = tiered("ls", url="ftp://x")
    assert code == 2
    assert "s3://BUCKET/PREFIX" in error
    code, _, error = tiered("ls", "--topic", "Odrers")
    assert code == 1
    assert "has no message of topic 'Odrers'" in error


def test_purge_removes_the_bytes_of_a_deleted_topic(
    tmp_path: Path, local_tier: Tier, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"

    def purge(*words: str) -> Told:
        code = main(["tiered", "purge", "--url", local_tier.url, "--data", str(data), *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    def objects_with(topic: str) -> int:
        """The number of files with messages of *topic*, also of those that the table does not have any more."""
        found = 0
        for path in Path(local_tier.url, "table").glob("date=*/kind=topic/*.parquet"):
            footer = footer_of(pq.read_metadata(path))
            assert footer is not None
            found += topic in {span.topic for span in footer.spans}
        return found

    def send(name_server: str, topic: str) -> None:
        with Producer(name_server, "producers") as producer:
            for body in BODIES[:50]:
                producer.send(Message(topic, body))

    def delete(name_server: str, topic: str) -> None:
        assert main(["topic", "delete", topic, "--name-server", name_server, "--yes"]) == 0
        capsys.readouterr()

    with running(tmp_path, local_tier) as (name_server, process):
        for topic in ("secrets", "others", "T"):
            send(name_server, topic)
        process.until(lambda: objects_with("secrets") > 0 and objects_with("others") > 0)
        code, _, error = purge("--topic", "secrets")
        assert (code, "topic 'secrets' was not deleted" in error) == (1, True)
        for topic in ("secrets", "others"):
            delete(name_server, topic)
        send(name_server, "secrets")
        code, text, _ = purge("--topic", "others", "--json")
        found = json.loads(text)
        assert (code, found["messages"], found["damaged"]) == (0, 50, [])
        assert found["objects"] >= 2
        assert objects_with("others") == 0
        code, text, _ = purge("--json")
        assert (code, json.loads(text)["messages"]) == (0, 50)
        assert "0 files lost 0 messages of deleted topics" in purge()[1]
        with PullConsumer(name_server, "readers") as consumer:
            kept = [message.body for queue in consumer.queues("secrets") for message in consumer.read(queue, 0)]
        assert sorted(kept) == BODIES[:50]
        send(name_server, "last")
        delete(name_server, "last")
        delete(name_server, "secrets")
        end = json.loads(status_of(local_tier, data, capsys))["running"]["position"]
        process.until(lambda: json.loads(status_of(local_tier, data, capsys))["running"]["position"] > end)
        process.until(lambda: json.loads(status_of(local_tier, data, capsys))["running"]["behind_bytes"] == 0)
    lock = lock_directory(str(data), RealDisk())
    assert "does not have the plugin tiered" in purge()[2]
    RealDisk().close(lock)
    code, text, _ = purge("--json")
    assert (code, json.loads(text)["messages"]) == (0, 50)
    assert objects_with("secrets") == 0
    assert objects_with("last") == 0
    code, text, _ = purge()
    assert (code, text.startswith("0 files lost 0 messages")) == (0, True)
    with running(tmp_path, local_tier) as (name_server, process), PullConsumer(name_server, "others") as consumer:
        assert sum(len(list(consumer.read(queue, 0))) for queue in consumer.queues("T")) == 50


def status_of(place: Tier, data: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["tiered", "status", "--url", place.url, "--data", str(data), "--json"]) == 0
    return capsys.readouterr().out


def test_purge_needs_a_data_directory(tiered: Command, tmp_path: Path) -> None:
    code, _, error = tiered("purge")
    assert code == 2
    assert "a running broker has to do it, and none is known; give --config FILE or --data DIR" in error
    code, _, error = tiered("purge", "--data", str(tmp_path))
    assert "is no data directory" in error


# Only root can give files to another user; for others, new files must simply stay their own.
OWNER = 12345 if os.geteuid() == 0 else os.geteuid()


def owners_after(tiered: Command, history: History, tmp_path: Path, *words: str) -> set[int]:
    """Run a command on a tier that belongs to `OWNER`; return the owners of all files and directories after it."""
    root, data = Path(history.url).parent, tmp_path / "data"
    (data / "commitlog").mkdir(parents=True)
    for path in (root, *root.rglob("*")):
        os.chown(path, OWNER, -1)
    assert tiered(*words, "--data", str(data))[0] == 0
    return {path.stat().st_uid for path in (root, *root.rglob("*"))}


def test_what_root_purges_belongs_to_the_owner_of_the_tier(tiered: Command, history: History, tmp_path: Path) -> None:
    commits = len(list(Path(history.url, "_delta_log").iterdir()))
    assert owners_after(tiered, history, tmp_path, "purge") == {OWNER}
    assert len(list(Path(history.url, "_delta_log").iterdir())) > commits


def test_what_root_rebuilds_belongs_to_the_owner_of_the_tier(tiered: Command, history: History, tmp_path: Path) -> None:
    keys = min(Path(history.url).parent.rglob("*.keys"))
    keys.unlink()
    assert owners_after(tiered, history, tmp_path, "rebuild") == {OWNER}
    assert keys.exists()


async def test_a_request_that_fails_ends_no_other(tmp_path: Path) -> None:
    going_on = trio.Event()

    async def read() -> TierStatus:
        raise OSError("the disk fails")

    async def purge(topic: str) -> AsyncGenerator[PurgeStatus, None]:
        if topic == "bad":
            raise StoreFailed("the log cannot be written")
        yield PurgeStatus(done=1)
        await going_on.wait()
        yield PurgeStatus(done=2, is_over=True)

    folder = str(tmp_path)
    broker: Any = SimpleNamespace(store=SimpleNamespace(disk=RealDisk(), data_directory=SimpleNamespace(path=folder)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(StatusSocket(broker, read, purge).run)
        await until(lambda: Path(folder, NAME).exists())
        good = request_purge(folder, "good")
        assert (await trio.to_thread.run_sync(lambda: next(good))).done == 1
        with pytest.raises(OSError, match="cannot tell: the disk fails"):
            await trio.to_thread.run_sync(read_status, folder)
        (failed,) = await trio.to_thread.run_sync(lambda: list(request_purge(folder, "bad")))
        assert failed.error == "the log cannot be written"
        going_on.set()
        assert [state.done for state in await trio.to_thread.run_sync(lambda: list(good))] == [2]
        nursery.cancel_scope.cancel()


async def test_purge_names_files_that_another_program_has_written(
    tmp_path: Path, local_tier: Tier, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    (data / "commitlog").mkdir(parents=True)
    async with open_store(tmp_path) as store:
        for body in (b"1", b"2"):
            fill(store, (message(body, "T"), 0))
            await upload_all(store, Place(local_tier))
        store.deletions.delete_topic("T")
        store.flusher.flush_now()
        await upload_all(store, Place(local_tier))
    assert DeltaTable(f"{local_tier.url}/table").optimize.compact()["numFilesAdded"] == 1
    words = ["tiered", "purge", "--url", local_tier.url, "--data", str(data)]
    assert await trio.to_thread.run_sync(main, words) == 1
    assert ".parquet: another program has written it\n" in capsys.readouterr().out
