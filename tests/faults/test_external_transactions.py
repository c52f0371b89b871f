"""A real process ends while it delivers a large external transaction, and its derived files are damaged."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.test_held_messages import derived_files, leave, put_back, remove, zero
from tests.interop.martlet_process import Martlet
from tests.wire_clients.remoting import BlockingRemotingClient, send_request

from martlet.records.codec import decode_records
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

TOPICS = "Left", "Right"
CHUNK = 2000  # about four groups


class Sink:
    """A broker, and what its topics must have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker = Martlet(folder, {"store.segment_bytes": "4194304"})
        self.remote = BlockingRemotingClient(self.broker.address)
        self.sequence = 0
        self.epoch = 0
        self.expected: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}

    def named(self, **more: object) -> dict[str, object]:
        return {"producer": "query", "epoch": self.epoch, "sequence": self.sequence, **more}

    def ask(self, code: int, ext: dict[str, object], body: bytes = b"") -> Command:
        answer = self.remote.ask(code, ext, body)
        assert answer.code == 0, answer.remark
        return answer

    def begin(self) -> None:
        run: dict[str, object] = {"producer": "query", "run": f"r{self.epoch + 1}", "topic": TOPICS[0]}
        answer = self.ask(RequestCode.BEGIN_EXTERNAL_TRANSACTIONS, run)
        assert (answer.ext["epoch"], answer.ext["committed"]) == (str(self.epoch + 1), str(self.sequence - 1))
        self.epoch += 1

    def stage(self, part: str) -> None:
        for chunk, topic in enumerate(TOPICS):
            bodies = [b"%d-%s-%d" % (self.sequence, part.encode(), number) for number in range(CHUNK)]
            ext = {**send_request(topic, 0, "k", b"", 0).ext, **self.named(part=part, chunk=chunk)}
            self.ask(RequestCode.STAGE_EXTERNAL_MESSAGES, ext, encode_batch(map(BatchMessage, bodies)))
            self.expected[topic] += bodies

    def commit(self, parts: list[str]) -> Command:
        body = json.dumps({"parts": [[part, len(TOPICS)] for part in parts]}).encode()
        return Command(RequestCode.COMMIT_EXTERNAL_TRANSACTION, self.named(), body)

    def stored(self, topic: str) -> list[bytes]:
        found: list[bytes] = []
        while (answer := self.remote.pull(topic, 0, len(found))).code == 0:
            found += [record.body for record in decode_records(answer.body)]
        return found


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sink]:
    made = Sink(tmp_path_factory.mktemp("external"))
    yield made
    made.remote.close()
    made.broker.close()


@pytest.mark.parametrize("damage", [leave, remove, zero, put_back], ids=lambda damage: damage.__name__)
def test_a_commit_that_is_repeated_after_a_kill_delivers_each_message_once(
    sink: Sink, damage: Callable[[Path, Path], None]
) -> None:
    older = sink.folder / f"older-{sink.sequence}"
    for path in derived_files(sink.broker.data):
        copy = older / path.relative_to(sink.broker.data)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    older.mkdir(exist_ok=True)
    sink.begin()
    sink.stage("a")
    sink.stage("b")
    sink.remote.send(sink.commit(["a", "b"]))
    wanted = len(sink.expected[TOPICS[0]]) - 2 * CHUNK
    with BlockingRemotingClient(sink.broker.address) as watcher:
        while watcher.pull(TOPICS[0], 0, wanted).code != 0:
            pass  # until the first messages are readable
    sink.broker.kill()
    sink.remote.close()
    damage(sink.broker.data, older)
    sink.broker.start()
    sink.remote = BlockingRemotingClient(sink.broker.address)
    sink.remote.send(sink.commit(["a", "b"]))
    assert sink.remote.receive().ext["committed"] == str(sink.sequence)
    sink.sequence += 1
    for topic in TOPICS:
        assert sink.stored(topic) == sink.expected[topic]
