"""External transactions over the remoting protocol, in a running broker."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import orjson
import pytest
import trio
from tests.remoting.conftest import pull_ext, send_ext
from tests.remoting.test_plugin import PATIENCE_S, PULL, SEND, Caller, Running, broker

from martlet.message import decode_properties
from martlet.records.codec import decode_records
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_tx.external.state import ExternalState

BEGIN, STAGE = RequestCode.BEGIN_EXTERNAL_TRANSACTIONS, RequestCode.STAGE_EXTERNAL_MESSAGES
COMMIT, ABORT = RequestCode.COMMIT_EXTERNAL_TRANSACTION, RequestCode.ABORT_EXTERNAL_TRANSACTION
LIST = RequestCode.LIST_EXTERNAL_TRANSACTIONS


class SparkSink:
    """What a sink asks of one broker, over one connection."""

    def __init__(self, client: Caller, producer: str = "query", topic: str = "T") -> None:
        self.client = client
        self.topic = topic
        self.producer = producer
        self.epoch = 0

    async def begin(self, run: str) -> Command:
        answer = await self.client.ask(BEGIN, {"producer": self.producer, "run": run, "topic": self.topic})
        self.epoch = int(str(answer.ext.get("epoch", self.epoch)))
        return answer

    async def stage(
        self,
        sequence: int,
        part: str,
        chunk: int,
        bodies: Sequence[bytes],
        properties: bytes = b"",
        ext: Mapping[str, object] = MappingProxyType({}),
    ) -> Command:
        named = {**send_ext(self.topic, 1), "producer": self.producer, "epoch": self.epoch, "sequence": sequence}
        named |= {"part": part, "chunk": chunk, **ext}
        body = encode_batch([BatchMessage(body, b"TAGS\x01spark\x02" + properties) for body in bodies])
        return await self.client.ask(STAGE, {name: value for name, value in named.items() if value is not None}, body)

    async def end(self, code: int, sequence: int, parts: object) -> Command:
        ext = {"producer": self.producer, "epoch": self.epoch, "sequence": sequence, "topic": self.topic}
        return await self.client.ask(code, ext, orjson.dumps({"parts": parts}))

    async def received(self, queue_id: int = 1, topic: str = "T", offset: int = 0) -> list[bytes]:
        answer = await self.client.ask(PULL, pull_ext(topic, offset, queue_id))
        return [record.body for record in decode_records(answer.body)]


@asynccontextmanager
async def serving(folder: Path, tx: Mapping[str, object] | None = None, *plugins: str) -> AsyncIterator[Running]:
    async with broker(folder, "tx", *plugins, sections={"tx": tx or {}}) as running:
        yield running


@asynccontextmanager
async def spark(folder: Path, tx: Mapping[str, object] | None = None, *plugins: str) -> AsyncIterator[SparkSink]:
    async with serving(folder, tx, *plugins) as running:
        yield SparkSink(await running.connect())


async def test_a_batch_is_received_after_its_commit_and_once(tmp_path: Path) -> None:
    async with spark(tmp_path) as sink:
        begun = await sink.begin("run-1")
        assert (begun.code, begun.ext["epoch"], begun.ext["committed"]) == (0, "1", "-1")
        for chunk in (0, 1, 1):  # the second one again
            staged = await sink.stage(0, "task-1", chunk, [b"%d-a" % chunk, b"%d-b" % chunk])
            assert (staged.code, staged.ext) == (0, {"chunks": str(chunk + 1), "committed": "false"})
        assert await sink.received() == []
        done = await sink.end(COMMIT, 0, [["task-1", 2]])
        assert (done.code, done.ext) == (0, {"committed": "0", "duplicate": "false", "messages": "4"})
        assert await sink.received() == [b"0-a", b"0-b", b"1-a", b"1-b"]
        again = await sink.end(COMMIT, 0, [["task-1", 2]])
        assert again.ext == {"committed": "0", "duplicate": "true", "messages": "0"}
        late = await sink.stage(0, "task-2", 0, [b"x"])
        assert (late.code, late.ext) == (0, {"chunks": "0", "committed": "true"})
        assert len(await sink.received()) == 4


async def test_a_restarted_broker_still_knows_what_was_staged_and_committed(tmp_path: Path) -> None:
    async with spark(tmp_path) as sink:
        await sink.begin("run-1")
        await sink.stage(0, "task", 0, [b"zero"])
        await sink.end(COMMIT, 0, [["task", 1]])
        await sink.stage(1, "task", 0, [b"one"])
    async with spark(tmp_path) as sink:
        begun = await sink.begin("run-1")
        assert (begun.ext["epoch"], begun.ext["committed"]) == ("1", "0")
        assert (await sink.end(COMMIT, 1, [["task", 1]])).ext["messages"] == "1"
        assert await sink.received() == [b"zero", b"one"]


async def test_a_run_that_was_replaced_is_refused_whatever_it_asks(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        old, new = SparkSink(await running.connect()), SparkSink(await running.connect())
        await old.begin("old")
        assert (await old.stage(3, "task", 0, [b"old"])).code == 0
        assert (await new.begin("new")).ext["epoch"] == "2"
        fenced = ResponseCode.ILLEGAL_OPERATION
        assert (await old.stage(3, "task", 1, [b"old"])).code == fenced
        refused = await old.end(COMMIT, 3, [["task", 1]])
        assert (refused.code, refused.remark) == (
            fenced,
            "run with epoch 1 of producer 'query' was replaced by a newer run; stop, the newer one goes on",
        )
        assert (await old.begin("old")).code == fenced
        assert (await old.end(ABORT, 3, None)).ext == {"dropped": "0"}
        assert (await new.end(COMMIT, 3, [["task", 1]])).code == ResponseCode.QUERY_NOT_FOUND
        assert (await new.end(COMMIT, 3, [])).ext["duplicate"] == "false"
        assert await new.received() == []


async def test_without_runs_each_task_commits_its_own_part_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        for attempt in range(2):
            for partition in range(2):
                task = SparkSink(await running.connect(), f"query/{partition}")
                staged = await task.stage(7, f"attempt-{attempt}", 0, [b"%d" % partition])
                assert staged.ext["committed"] == ("false", "true")[attempt]
                if staged.ext["committed"] == "false":
                    assert (await task.end(COMMIT, 7, [[f"attempt-{attempt}", 1]])).code == 0
        assert await task.received() == [b"0", b"1"]


async def test_two_drivers_that_race_deliver_one_of_their_batches(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        answers: list[Command] = []

        async def drive(run: str) -> None:
            sink = SparkSink(await running.connect())
            await sink.begin(run)
            await sink.stage(0, run, 0, [run.encode()])
            answers.append(await sink.end(COMMIT, 0, [[run, 1]]))

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(drive, f"run-{number}")
        committed = [answer for answer in answers if answer.ext.get("duplicate") == "false"]
        refused = {answer.code for answer in answers if answer not in committed}
        assert refused <= {0, ResponseCode.ILLEGAL_OPERATION, ResponseCode.QUERY_NOT_FOUND}
        received = await SparkSink(await running.connect()).received()
        assert len(received) == len(committed) == 1


async def test_an_aborted_part_cannot_be_committed(tmp_path: Path) -> None:
    async with spark(tmp_path) as sink:
        for part in ("a", "b", "c"):
            await sink.stage(0, part, 0, [part.encode()])
        assert (await sink.end(ABORT, 0, ["a", "unknown"])).ext == {"dropped": "1"}
        assert (await sink.end(ABORT, 0, ["a"])).ext == {"dropped": "0"}
        refused = await sink.end(COMMIT, 0, [["a", 1]])
        assert (refused.code, refused.remark) == (
            ResponseCode.QUERY_NOT_FOUND,
            "part 'a' of transaction 0 of 'query' has 0 of 1 chunks: it expired (tx.staged_timeout_ms), was aborted, "
            "or was never staged completely; stage it again under another name",
        )
        assert (await sink.end(COMMIT, 0, [["b", 1]])).code == 0  # which drops c
        assert (await sink.end(ABORT, 0, None)).ext == {"dropped": "0"}
        assert await sink.received() == [b"b"]


async def test_staged_messages_may_have_a_time(tmp_path: Path) -> None:
    async with spark(tmp_path, None, "timer") as sink:
        await sink.stage(0, "a", 0, [b"late"], b"TIMER_DELAY_MS\x01300\x02")
        await sink.stage(0, "a", 1, [b"level"], b"DELAY\x011\x02")
        await sink.stage(0, "a", 2, [b"now"])
        assert (await sink.end(COMMIT, 0, [["a", 3]])).ext["messages"] == "3"
        assert b"now" in await sink.received()
        with trio.fail_after(PATIENCE_S):
            while len(found := await sink.received()) < 3:
                await sink.client.ask(
                    PULL, {**pull_ext("T", len(found), 1), "sysFlag": "2", "suspendTimeoutMillis": "500"}
                )
        assert sorted(found) == [b"late", b"level", b"now"]


WRONG_STAGES: Final[list[tuple[dict[str, object], int, str]]] = [
    ({"producer": None}, 1, "lacks the header field producer"),
    ({"producer": ""}, 29, "producer '' has 0 characters or unprintable ones; use 1 to 255 printable characters"),
    ({"part": "x" * 65}, 29, "has 65 characters or unprintable ones; use 1 to 64"),
    ({"part": "a\nb"}, 29, "unprintable"),
    ({"epoch": "3"}, 22, "epoch 3 of producer 'query' is unknown"),
    ({"epoch": "-1"}, 604, "was replaced by a newer run"),
    ({"sequence": "-1"}, 29, "sequence -1 is not a number from 0"),
    ({"sequence": "x"}, 1, "not a 64-bit integer"),
    ({"chunk": "1"}, 22, "chunk 1 of part 'a' follows 0 chunks; chunk 0 is missing, stage it first"),
    ({"chunk": "-1"}, 22, "chunk -1 of part 'a' follows 0 chunks"),
    ({"b": None}, 1, "lacks the header field b"),
    ({"b": "no/topic"}, 29, "no/topic"),
    ({"b": "martlet.external-events"}, 16, "only the broker writes it"),
    ({"b": "%RETRY%G"}, 13, "is of retries; stage messages for another topic"),
    ({"e": "99"}, 29, "queue 99 of topic[T] does not exist"),
    ({"f": "4"}, 29, "sysFlag 4 is of another transaction"),
]
WRONG_COMMITS: Final[list[tuple[bytes, int, str]]] = [
    (b"x", 1, "is not JSON"),
    (b"[]", 1, "is not a JSON object"),
    (b'{"parts": 7}', 1, "body of the request is not valid"),
    (b'{"parts": ["a"]}', 1, 'send {"parts": [["name", chunks], ...]}'),
    (b'{"parts": [["a", 1], ["a", 1]]}', 13, "commit names a part twice"),
    (b'{"parts": [["a", 2]]}', 22, "has 1 of 2 chunks"),
    (b'{"parts": [["a", 0]]}', 22, "has 1 of 0 chunks"),
    (b'{"parts": [["a", -1]]}', 22, "has 1 of -1 chunks"),
]


async def test_a_wrong_stage_is_refused_with_a_reason(tmp_path: Path) -> None:
    async with spark(tmp_path) as sink:
        await sink.client.ask(SEND, send_ext("T", 1, "UNIQ_KEY\x01U\x02"), b"plain")
        for change, code, text in WRONG_STAGES:
            answer = await sink.stage(0, "a", 0, [b"x"], ext=change)
            assert (answer.code, text in str(answer.remark)) == (code, True), answer.remark
        assert (await sink.stage(0, "a", 0, [b"x"])).ext == {"chunks": "1", "committed": "false"}


async def test_a_wrong_commit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with spark(tmp_path) as sink:
        await sink.stage(0, "a", 0, [b"x"])
        for body, code, text in WRONG_COMMITS:
            answer = await sink.client.ask(COMMIT, {"producer": "query", "epoch": 0, "sequence": 0}, body)
            assert (answer.code, text in str(answer.remark)) == (code, True), answer.remark
        assert await sink.received() == []
        assert (await sink.end(COMMIT, 0, [["a", 1]])).code == 0


async def test_messages_that_a_batch_cannot_have_are_refused(tmp_path: Path) -> None:
    async with spark(tmp_path) as sink:
        for bodies, properties, code, text in (
            ([], b"", 13, "staged batch is empty"),
            ([b"x"], b"TRAN_MSG\x01true\x02PGROUP\x01P\x02", 13, "has the property TRAN_MSG of another transaction"),
            ([b"x"], b"A\x01\x00\x02", 13, "contain U+0000"),
        ):
            answer = await sink.stage(0, "a", 0, bodies, properties)
            assert (answer.code, text in str(answer.remark)) == (code, True), answer.remark


async def test_empty_messages_and_those_of_the_largest_size_are_staged_and_delivered(tmp_path: Path) -> None:
    """Consumers of MQTT clear a retained message by an empty one, and whoever copies a topic has both."""
    limit = 4 << 20
    async with spark(tmp_path) as sink:
        for number, body in enumerate((b"", bytes(limit), b"x")):
            assert (await sink.stage(0, "a", number, [body], b"A\x01" + b"b" * 30_000 + b"\x02")).code == 0
        answer = await sink.stage(0, "a", 3, [bytes(limit + 1)])
        assert (answer.code, f"message body is {limit + 1} bytes" in str(answer.remark)) == (13, True), answer.remark
        assert (await sink.end(COMMIT, 0, [["a", 3]])).code == 0
        bodies = [body for offset in range(3) for body in (await sink.received(offset=offset))[:1]]
        assert [len(body) for body in bodies] == [0, limit, 1]


async def test_a_broker_without_the_plugin_names_it(tmp_path: Path) -> None:
    async with broker(tmp_path) as running:
        sink = SparkSink(await running.connect())
        for answer in (
            await sink.begin("r"),
            await sink.stage(0, "a", 0, [b"x"]),
            await sink.end(COMMIT, 0, []),
            await sink.end(ABORT, 0, []),
            await sink.client.ask(LIST, {}),
        ):
            assert answer.code == ResponseCode.NO_PERMISSION
            assert str(answer.remark).endswith(
                "does not support external transactions; add the plugin tx to plugins.enabled"
            )


async def test_a_list_shows_who_has_staged_and_committed_what(tmp_path: Path) -> None:
    async with spark(tmp_path) as sink:
        await sink.begin("run-1")
        await sink.end(COMMIT, 4, [])
        await sink.stage(5, "a", 0, [b"1", b"2"])
        other = SparkSink(sink.client, "zebra")
        await other.stage(0, "a", 0, [b"3"])
        rows = orjson.loads((await sink.client.ask(LIST, {})).body)["producers"]
        assert [(row["name"], row["run"], row["epoch"], row["committed"], row["messages"]) for row in rows] == [
            ("query", "run-1", 1, 4, 2),
            ("zebra", "", 0, -1, 1),
        ]
        after = orjson.loads((await sink.client.ask(LIST, {"producer": "query", "count": 1})).body)["producers"]
        assert [row["name"] for row in after] == ["zebra"]


async def test_what_is_staged_is_in_no_answer_to_other_requests(tmp_path: Path) -> None:
    async with spark(tmp_path) as sink:
        await sink.stage(0, "a", 0, [b"secret"], b"KEYS\x01k\x02UNIQ_KEY\x01U1\x02")
        ext = {"topic": "T", "key": "k", "maxNum": 9, "beginTimestamp": 0, "endTimestamp": 1 << 62}
        assert (await sink.client.ask(RequestCode.QUERY_MESSAGE, ext)).code == ResponseCode.QUERY_NOT_FOUND
        for topic in ("martlet.external-staged", "martlet.external-events"):
            assert (await sink.client.ask(PULL, pull_ext(topic, 0, 0))).code == ResponseCode.NO_PERMISSION
        await sink.end(COMMIT, 0, [["a", 1]])
        (record,) = decode_records((await sink.client.ask(RequestCode.QUERY_MESSAGE, ext)).body)
        assert decode_properties(record.properties) == {"TAGS": "spark", "KEYS": "k", "UNIQ_KEY": "U1"}


async def test_requests_that_wait_for_a_projection_that_fails_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("the test says so")

    async with serving(tmp_path) as running:
        asking = [SparkSink(await running.connect()) for _ in range(3)]
        await asking[0].stage(0, "task", 0, [b"x"])
        monkeypatch.setattr(ExternalState, "apply", fail)
        answers: list[Command] = []

        async def ask(sink: SparkSink, number: int) -> None:
            answers.append(await (sink.end(COMMIT, 0, [["task", 1]]) if number else sink.begin("run")))

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for number, sink in enumerate(asking):
                    nursery.start_soon(ask, sink, number)
        assert len(answers) == 3
        assert all(answer.code for answer in answers)
        assert any("external transactions have stopped" in str(answer.remark) for answer in answers)
        assert (await asking[0].begin("run")).code == ResponseCode.NO_PERMISSION
        assert (await asking[0].client.ask(SEND, send_ext("T", 1), b"plain")).code == 0
