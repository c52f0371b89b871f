"""The fast path for usual sends stores and answers the same as the general one."""

import random
from collections.abc import Mapping

import pytest

from martlet.contracts import Stage
from martlet.message import Message, Record
from martlet.records.codec import decode_records
from martlet_remoting.handler import TABLE
from martlet_remoting.handlers import send
from martlet_remoting.handlers.context import Answer
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .conftest import FakeClient, Harness, OpenHarness, send_ext

V2 = RequestCode.SEND_MESSAGE_V2
UNIQUE = "UNIQ_KEY\x017F0000010A2B18B4AAC200000000\x02"


class Paths:
    """One broker and two clients: the requests of one are handled as usual, those of the other always the long way."""

    def __init__(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.harness = harness
        self.usual, self.long = harness.client(), harness.client()
        self.long.peer.host, self.long.peer.address = self.usual.peer.host, self.usual.peer.address
        self.long.handler._table = {**TABLE, V2: send.send_message}
        self.long.connection.takes_runs = False
        for topic in ("T", "read-only"):
            self.usual.handler.context.connection_gate().check_publish(topic)
        self.taken_long = 0
        real = send.send_message

        def counted(*args: object) -> Answer:
            self.taken_long += 1
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(send, "send_message", counted)

    async def send(self, ext: Mapping[str, object], body: bytes = b"hello") -> tuple[object, object]:
        """Send the same both ways; return what each answered and stored, without its place in the log."""
        return await self._send(self.usual, ext, body), await self._send(self.long, ext, body)

    async def _send(self, client: FakeClient, ext: Mapping[str, object], body: bytes) -> object:
        before, client.peer.held_until = self.harness.store.appended, 0
        answer = await client.ask(V2, ext, body)
        grown = self.harness.store.appended > before
        assert client.peer.held_until == (self.harness.store.appended if grown else 0)
        fields = {name: value for name, value in answer.ext.items() if name not in ("msgId", "queueOffset")}
        record = None
        if grown:
            record = self._newest()
            assert answer.ext["msgId"] == self.harness.state.templates.message_id(record.position)
            assert answer.ext["queueOffset"] == str(record.queue_offset)
        return answer.code, answer.remark, fields, record and _contents(record)

    def _newest(self) -> Record:
        store = self.harness.store
        found = [
            record
            for queue in store.queues.all()
            if queue.next_offset > queue.first_offset
            for record in decode_records(b"".join(store.readers.read(queue, queue.next_offset - 1, 1, 1).pieces))
        ]
        return max(found, key=lambda record: record.position)


def _contents(record: Record) -> tuple[object, ...]:
    return (
        record.topic,
        record.queue_id,
        record.body,
        record.properties,
        record.flag,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        record.reconsume_times,
        record.prepared_position,
    )


@pytest.fixture
def paths(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Paths:
    harness.topic("T")
    harness.topic("read-only", perm=4)
    return Paths(harness, monkeypatch)


USUAL = [
    pytest.param(send_ext("T", 2, UNIQUE), id="unique key alone"),
    pytest.param(send_ext("T", 2, UNIQUE[:-1]), id="no separator at the end"),
    pytest.param(send_ext("T", 0, "TAGS\x01A\x02" + UNIQUE + "KEYS\x01k1 k2\x02WAIT\x01true\x02"), id="tags and keys"),
    pytest.param(send_ext("T", 1, UNIQUE, h="7", f="1"), id="flag, and compressed"),
    pytest.param(send_ext("T", 1, UNIQUE + "Größe\x01süß\x02"), id="letters beyond ASCII"),
    pytest.param(send_ext("T", 1, UNIQUE, g="1"), id="born long ago"),
    pytest.param(send_ext("T", 2, UNIQUE + "DELAY\x010\x02"), id="delay of 0"),
    pytest.param(send_ext("T", 2, UNIQUE + "DELAY\x013\x02"), id="delay"),
    pytest.param(send_ext("T", 2, UNIQUE + "TIMER_DELAY_MS\x015\x02"), id="timer"),
    pytest.param(send_ext("T", 2, UNIQUE + "TRAN_MSG\x01true\x02"), id="transaction"),
]
UNUSUAL = [
    pytest.param(send_ext("T", 9, UNIQUE), id="no such queue"),
    pytest.param(send_ext("read-only", 0, UNIQUE), id="topic that takes none"),
    pytest.param(send_ext("T", 2, "TAGS\x01A\x02UNIQ_KEY\x01a b\x02"), id="unique key that needs escaping"),
    pytest.param(send_ext("T", 2, "XUNIQ_KEY\x01abc\x02" + UNIQUE), id="end of another property's name"),
    pytest.param(send_ext("T", 2, UNIQUE + "CLUSTER\x01other\x02"), id="cluster"),
    pytest.param(send_ext("T", 2, UNIQUE + "MSG_REGION\x01other\x02"), id="region"),
    pytest.param(send_ext("T", 2, UNIQUE + "POP_CK\x01x\x02"), id="handle of a pop"),
    pytest.param(send_ext("T", 2, UNIQUE, f="4"), id="transaction flag"),
    pytest.param(send_ext("T", 2, UNIQUE, h="-5"), id="negative flag"),
    pytest.param(send_ext("T", 2, UNIQUE, g="-5"), id="negative time"),
    pytest.param(send_ext("T", 2, UNIQUE, j="2"), id="sent again"),
    pytest.param(send_ext("%RETRY%G", 0, UNIQUE), id="retry"),
    pytest.param(send_ext("SCHEDULE_TOPIC_XXXX", 0, UNIQUE), id="topic of the broker"),
    pytest.param(send_ext("no such topic", 0, UNIQUE), id="name that cannot be"),
]


@pytest.mark.parametrize("ext", USUAL)
async def test_usual_sends_take_the_short_way_and_store_the_same(paths: Paths, ext: Mapping[str, object]) -> None:
    usual, long = await paths.send(ext)
    assert usual == long
    assert paths.taken_long == 0


@pytest.mark.parametrize("ext", UNUSUAL)
async def test_unusual_sends_take_the_long_way(paths: Paths, ext: Mapping[str, object]) -> None:
    usual, long = await paths.send(ext)
    assert usual == long
    assert paths.taken_long == 1


async def test_a_stage_that_wants_every_message_gets_those_that_take_the_short_way(paths: Paths) -> None:
    seen: list[bytes] = []

    def note(message: Message) -> Message:
        seen.append(message.body)
        message.properties += b"SEEN\x011\x02"
        return message

    broker = paths.harness.broker
    broker.set_stages([*broker.stages.pairs, ("every", Stage(note))])
    usual, long = await paths.send(send_ext("T", 2, UNIQUE))
    assert usual == long
    assert seen == [b"hello"] * 2
    assert paths.taken_long == 0


async def test_a_body_is_wanted_on_both_ways(paths: Paths) -> None:
    usual, long = await paths.send(send_ext("T", 0, UNIQUE), b"")
    assert usual == long
    assert paths.taken_long == 1


@pytest.mark.parametrize("seed", range(8))
async def test_any_mixture_is_stored_the_same_on_both_ways(paths: Paths, seed: int) -> None:
    dice = random.Random(seed)
    parts = [UNIQUE, "TAGS\x01A\x02", "KEYS\x01k\x02", "WAIT\x01true\x02", "a\x01\x02", "\x02", "TRACE_ON\x01a\x02"]
    short = 0
    for _ in range(40):
        properties = "".join(dice.sample(parts, dice.randint(0, len(parts))))
        numbers = {"f": dice.choice("0001"), "h": str(dice.randint(-1, 9)), "j": dice.choice("0003")}
        before = paths.taken_long
        usual, long = await paths.send(send_ext("T", dice.randint(0, 3), properties, **numbers))
        short += paths.taken_long == before
        if UNIQUE[:-1] in properties:
            assert usual == long, properties
    assert short > 4


async def test_both_ways_refuse_while_too_much_waits_for_the_disk(
    open_harness: OpenHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await open_harness(store={"flush": "sync"}, unflushed_bytes_max=1 << 20)
    harness.topic("T")
    paths = Paths(harness, monkeypatch)
    for client in (paths.usual, paths.long):
        for _ in range(20):
            client.send(V2, send_ext("T", 0, UNIQUE), bytes(100_000))
        await harness.step()
        codes = [answer.code for answer in client.answers.values()]
        assert codes == [ResponseCode.SUCCESS] * 11 + [ResponseCode.SYSTEM_BUSY] * 9


async def test_a_usual_send_is_answered_once_it_is_durable(paths: Paths) -> None:
    client, store = paths.usual, paths.harness.store
    client.send(V2, send_ext("T", 0, UNIQUE), b"x" * 1000)
    assert client.peer.held_until == store.appended > store.readable
    await paths.harness.step()


async def test_a_batch_is_answered_once_its_last_message_is_durable(paths: Paths) -> None:
    client, store = paths.usual, paths.harness.store
    body = encode_batch([BatchMessage(b"x" * 1000, UNIQUE.encode()) for _ in range(3)])
    client.send(RequestCode.SEND_BATCH_MESSAGE, send_ext("T", 0, m="true"), body)
    assert client.peer.held_until == store.appended > store.readable
    await paths.harness.step()
