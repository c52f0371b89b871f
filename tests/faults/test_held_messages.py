"""A real process ends while it holds delayed, timed, half and popped messages, and its derived files are damaged.

Everything acknowledged arrives afterwards, once (popped messages at least once), and nothing early.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.damage.files import is_derived
from tests.interop.martlet_process import Martlet
from tests.remoting.pop_talk import Popped, ack_ext, pop_ext, popped
from tests.wire_clients.remoting import BlockingRemotingClient, send_request

from martlet.message import Record, encode_properties
from martlet.records.codec import decode_records
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

TOPIC = "Held"
EACH = 12
LEVEL_MS = 1000
TIMER_MS = 1500
INVISIBLE_MS = 1000
PATIENCE_S = 300.0
COMMIT, ROLLBACK = 8, 12


def derived_files(data: Path) -> list[Path]:
    return [path for path in data.rglob("*") if path.is_file() and is_derived(path.relative_to(data).as_posix())]


def leave(data: Path, older: Path) -> None:
    """Leave the files as they are."""


def remove(data: Path, older: Path) -> None:
    for path in derived_files(data):
        path.unlink()


def zero(data: Path, older: Path) -> None:
    for path in derived_files(data):
        path.write_bytes(bytes(path.stat().st_size))


def put_back(data: Path, older: Path) -> None:
    """Replace the files by their older versions."""
    remove(data, older)
    shutil.copytree(older, data, dirs_exist_ok=True)


class Held:
    """A broker, and what it acknowledged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker = Martlet(folder, {"timer.levels": "1s 2s", "store.segment_bytes": "4194304"})
        self.remote = BlockingRemotingClient(self.broker.address)
        self.due_ms: dict[str, int] = {}  # of what must arrive, by key
        self.rolled_back: set[str] = set()
        self.rounds = 0

    def older_files(self) -> Path:
        """Copy the derived files as they are now."""
        self.rounds += 1
        older = self.folder / f"older-{self.rounds}"
        older.mkdir()
        for path in derived_files(self.broker.data):
            copy = older / path.relative_to(self.broker.data)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the broker has replaced or removed it since
                shutil.copyfile(path, copy)
        return older

    def send(self, key: str, topic: str = TOPIC, sys_flag: int = 0, **properties: object) -> Command:
        request = send_request(topic, 0, key, key.encode(), 0)
        named = {"UNIQ_KEY": key, **{name: str(value) for name, value in properties.items()}}
        ext = {**request.ext, "f": sys_flag, "i": encode_properties(named).decode()}
        self.remote.send(Command(request.code, ext, request.body))
        answer = self.remote.receive()
        assert answer.code == 0, answer.remark
        return answer

    def send_delayed(self, key: str, delay_ms: int, **properties: int) -> None:
        self.due_ms[key] = int(time.time() * 1000) + delay_ms
        self.send(key, TOPIC, 0, **properties)

    def prepare(self, key: str) -> Command:
        return self.send(key, sys_flag=4, TRAN_MSG="true", PGROUP="P")

    def end(self, key: str, half: Command, how: int) -> None:
        ext = {
            "producerGroup": "P",
            "tranStateTableOffset": half.ext["queueOffset"],
            "commitLogOffset": int(str(half.ext["msgId"])[-16:], 16),
            "commitOrRollback": how,
            "fromTransactionCheck": "false",
            "msgId": key,
            "transactionId": key,
        }
        answer = self.remote.ask(RequestCode.END_TRANSACTION, ext)
        assert answer.code == 0, answer.remark
        if how == COMMIT:
            self.due_ms[key] = 0
        else:
            self.rolled_back.add(key)

    def pop(self, topic: str) -> list[Popped]:
        ext = pop_ext(topic, 0, invisibleTime=INVISIBLE_MS, pollTime=1000, bornTime=int(time.time() * 1000))
        answer = self.remote.ask(RequestCode.POP_MESSAGE, ext)
        return popped(answer) if answer.code == 0 else []

    def ack(self, message: Popped) -> bool:
        """Acknowledge *message*, and return whether that was before its invisible time ended."""
        assert self.remote.ask(RequestCode.ACK_MESSAGE, ack_ext(message)).code == 0
        return time.time() * 1000 < message.handle.pop_ms + INVISIBLE_MS

    def arrived(self) -> list[Record]:
        found: list[Record] = []
        while (answer := self.remote.pull(TOPIC, 0, len(found))).code == 0:
            found += decode_records(answer.body)
        return found

    def wait_arrived(self, keys: set[str]) -> set[str]:
        """Wait until all of *keys* have arrived; check everything that arrived so far, and return its keys."""
        ends_at = time.monotonic() + PATIENCE_S
        while True:
            records = self.arrived()
            came = Counter(record.body.decode() for record in records)
            if came.keys() >= keys:
                break
            assert time.monotonic() < ends_at, f"{sorted(keys - came.keys())} did not arrive"
            self.remote.pull(TOPIC, 0, len(records), hold_ms=1000)
        assert set(came.values()) == {1}, f"twice: {[key for key, count in came.items() if count > 1]}"
        assert not self.rolled_back & came.keys()
        early = [record.body for record in records if record.store_ms < self.due_ms[record.body.decode()]]
        assert early == []
        return set(came)

    def restart(self, *, orderly: bool, damage: Callable[[Path, Path], None], older: Path) -> None:
        if orderly:
            assert self.broker.stop() == 0
        else:
            self.broker.kill()
        self.remote.close()
        damage(self.broker.data, older)
        self.broker.start()
        self.remote = BlockingRemotingClient(self.broker.address)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    made = Held(tmp_path_factory.mktemp("held"))
    yield made
    made.remote.close()
    made.broker.close()


@pytest.mark.parametrize("damage", [leave, remove, zero, put_back], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("orderly", [False, True], ids=["killed", "stopped"])
def test_held_messages_arrive_once(held: Held, orderly: bool, damage: Callable[[Path, Path], None]) -> None:
    """The process ends before any message is due, or among the deliveries."""
    older = held.older_files()
    name = f"{held.rounds}"
    popping = f"Popped{name}"
    for number in range(EACH):
        held.send(f"{name}-pop-{number}", popping)
    halves = [(key, held.prepare(key)) for key in (f"{name}-half-{number}" for number in range(EACH))]
    for number, (key, half) in enumerate(halves[: EACH // 2]):
        held.end(key, half, (COMMIT, ROLLBACK)[number % 2])
    taken = held.pop(popping)
    assert len(taken) == EACH
    acknowledged = {message.body for message in taken[::2] if held.ack(message)}
    for number in range(EACH):
        held.send_delayed(f"{name}-level-{number}", LEVEL_MS, DELAY=1)
        held.send_delayed(f"{name}-timer-{number}", TIMER_MS, TIMER_DELAY_MS=TIMER_MS)
    if held.rounds % 3:
        held.wait_arrived({f"{name}-level-{number}" for number in range(EACH // 2)})
    held.restart(orderly=orderly, damage=damage, older=older)
    for number, (key, half) in enumerate(halves[EACH // 2 :]):
        held.end(key, half, (COMMIT, ROLLBACK)[number % 2])
    held.wait_arrived(set(held.due_ms))
    left = {message.body for message in taken[1::2]}
    ends_at = time.monotonic() + PATIENCE_S
    while left:
        assert time.monotonic() < ends_at, f"{sorted(left)} were not popped again"
        for message in held.pop(popping):
            assert message.body not in acknowledged
            held.ack(message)
            left.discard(message.body)


def test_nothing_arrives_again_later(held: Held) -> None:
    held.restart(orderly=False, damage=leave, older=held.folder)
    held.send_delayed("last", LEVEL_MS, DELAY=1)
    assert "last" in held.wait_arrived(set(held.due_ms))
