"""Half messages and END_TRANSACTION that arrive in one read are stored together, with the outcome of each alone."""

from collections.abc import Sequence
from typing import final

import pytest
from tests.remoting.conftest import send_ext
from tests.remoting.signing import sign, tell
from tests.tx.talk import TOPIC, Sellers, op_bodies, sellers

from martlet.contracts import Router, Stage
from martlet.message import Message, decode_properties
from martlet.records.layout import TRANSACTION_MASK
from martlet.testing.peers import RecordingPeer
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.wire.codec import FrameBuffer, decode_frame, encode_binary_command, encode_command
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command
from martlet_tx.formats import HALF_TOPIC, NAME, OP_TOPIC

END = RequestCode.END_TRANSACTION
COMMIT, ROLLBACK = 8, 12


@final
class Producer:
    """A connection to a broker that holds transactions."""

    def __init__(self, found: Sellers, *, in_runs: bool = True, binary: bool = False) -> None:
        self.found = found
        self.binary = binary
        self.peer = RecordingPeer()
        self.connection = RemotingConnection(1 << 24, 120.0, 0.0)
        self.handler = RemotingHandler(RemotingState(found.broker, RemotingConfig()), self.peer, self.connection)
        self.connection.takes_runs = in_runs
        self.handler.context.connection_gate().check_publish(TOPIC)

    async def read(self, *frames: bytes) -> dict[int, Command]:
        """Let the broker handle *frames* as one read; return its answers by their numbers."""
        if self.binary:
            frames = tuple(encode_binary_command(decode_frame(frame)) for frame in frames)
        self.connection.receive_data(b"".join(frames), 0.0)
        for event in self.connection.events():
            finish = self.handler.handle(event)
            if finish is not None:
                await finish
        await self.peer.run_started()
        await self.found.settle()
        answers = FrameBuffer()
        answers.receive_data(self.peer.take_sent())
        return {answer.opaque: answer for answer in answers.commands()}


def send(number: int, properties: str = "", key: str = "", queue_id: int = 0, flag: int = 0) -> bytes:
    text = f"UNIQ_KEY\x01{key or f'U{number}'}\x02{properties}"
    ext = send_ext(TOPIC, queue_id, text, f="4" if "TRAN_MSG" in properties else "0")
    return encode_command(Command(RequestCode.SEND_MESSAGE_V2, ext, b"body %d" % number, number, flag))


def half(number: int, properties: str = "PGROUP\x01P\x02") -> bytes:
    return send(number, f"TRAN_MSG\x01true\x02{properties}")


def end(number: int, sent: Command, how: int = COMMIT, flag: int = FLAG_ONEWAY, **more: object) -> bytes:
    ext: dict[str, object] = {
        "producerGroup": "P",
        "tranStateTableOffset": sent.ext["queueOffset"],
        "commitLogOffset": int(str(sent.ext["msgId"])[-16:], 16),
        "commitOrRollback": how,
        "fromTransactionCheck": "false",
    }
    return encode_command(Command(END, {**ext, **more}, b"", number, flag))


async def test_half_messages_of_one_read_are_stored_and_answered_as_each_alone() -> None:
    found, other = await sellers(), await sellers()
    frames = [half(1), send(2), half(3), half(4, ""), send(5), half(6), send(7)]
    together = await Producer(found).read(*frames)
    alone = Producer(other, in_runs=False)
    single: dict[int, Command] = {}
    for frame in frames:
        single |= await alone.read(frame)
    assert list(together) == list(range(1, 8))
    for number, answer in single.items():
        hidden = ("msgId",)
        assert together[number].code == answer.code == (ResponseCode.MESSAGE_ILLEGAL if number == 4 else 0)
        assert together[number].remark == answer.remark
        assert {k: v for k, v in together[number].ext.items() if k not in hidden} == {
            k: v for k, v in answer.ext.items() if k not in hidden
        }
    for topic in TOPIC, HALF_TOPIC:
        stored, expected = list(found.records(topic)), list(other.records(topic))
        assert [(each.body, each.properties, each.sys_flag) for each in stored] == [
            (each.body, each.properties, each.sys_flag) for each in expected
        ]
    assert found.broker.refused == other.broker.refused == 1
    assert found.pending() == [0, 1, 2]


@pytest.mark.parametrize("binary", [False, True], ids=["JSON", "ROCKETMQ"])
async def test_transactions_that_end_in_one_read_end_as_each_alone_with_one_op_record(binary: bool) -> None:
    outcomes = []
    for in_runs in True, False:
        found = await sellers()
        producer = Producer(found, in_runs=in_runs, binary=binary)
        sent = list((await producer.read(*[half(number) for number in range(10)])).values())
        answers = await producer.read(
            end(20, sent[0]),
            send(21),
            end(22, sent[1], ROLLBACK),
            end(23, sent[2], producerGroup="Q"),
            end(24, sent[3], 0),
            end(25, sent[4]),
            end(26, sent[4], ROLLBACK),
            end(27, sent[5], flag=0),
            end(28, sent[6], commitLogOffset=1),
            half(29),
            end(30, sent[7]),
            send(31, queue_id=-1),
            end(32, sent[8]),
        )
        assert [(number, answer.code) for number, answer in sorted(answers.items())] == [
            (21, 0),
            (27, 0),
            (29, 0),
            (31, 0),
        ]
        outcomes.append((sorted(found.stored()), found.pending(), found.held.committed, found.held.rolled_back))
        assert op_bodies(found) == ([b"0,1,4,7", b"5", b"8"] if in_runs else [b"0", b"1", b"4", b"5", b"7", b"8"])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == (sorted(["U0", "U4", "U5", "U7", "U8", "U21", "U31"]), [2, 3, 6, 9, 10], 5, 1)


def signed(user: str, frame: bytes, secret: bytes | None = None) -> bytes:
    command = decode_frame(frame)
    ext = sign(user, command.ext, command.body, secret)
    return encode_command(Command(command.code, ext, command.body, command.opaque, command.flag))


async def test_signed_ends_of_one_read_end_together_and_wrong_ones_end_nothing() -> None:
    found = await sellers()
    found.broker.authentication.authenticators = (tell,)
    producer = Producer(found)
    found.broker.authorizers = (lambda identity, action, name: identity.name == "ann",)
    sent = list((await producer.read(*[signed("ann", half(number)) for number in range(7)])).values())
    assert [answer.code for answer in sent] == [0] * 7
    ends = [signed("ann", end(number, each)) for number, each in enumerate(sent)]
    ends[2] = signed("ann", end(2, sent[2]), b"guess")
    ends[4] = signed("bob", end(4, sent[4]))
    ends[5] = end(5, sent[5])
    assert await producer.read(*ends) == {}
    assert op_bodies(found) == [b"0,1", b"3", b"6"]
    assert (found.stored(), found.pending()) == (["U0", "U1", "U3", "U6"], [2, 4, 5])
    assert found.broker.authentication.refused == 1


async def test_what_is_committed_together_is_stored_as_rocketmq_does() -> None:
    found = await sellers()
    producer = Producer(found)
    sent = list((await producer.read(*[half(number) for number in range(5)])).values())
    await producer.read(*[end(number, each) for number, each in enumerate(sent)])
    halves, finals, (op,) = list(found.records(HALF_TOPIC)), list(found.records(TOPIC)), found.records(OP_TOPIC)
    assert [each.body for each in finals] == [b"body %d" % number for number in range(5)]
    for prepared, committed in zip(halves, finals, strict=True):
        assert committed.sys_flag & TRANSACTION_MASK == 0x8
        assert committed.prepared_position == prepared.position
        assert committed.properties == prepared.properties
        assert (committed.born_ms, committed.born_host) == (prepared.born_ms, prepared.born_host)
    assert decode_properties(op.properties) == {"TAGS": "d"}
    assert (op.queue_id, op.body) == (0, b"0,1,2,3,4")
    assert found.pending() == []


async def test_commits_that_their_topic_refuses_leave_the_transactions_pending() -> None:
    found = await sellers()
    producer = Producer(found)
    sent = list((await producer.read(*[half(number) for number in range(6)])).values())
    found.broker.topics.update(TOPIC, 1, 1, perm=4)
    assert await producer.read(*[end(number, each) for number, each in enumerate(sent)]) == {}
    assert (found.stored(), found.pending()) == ([], list(range(6)))
    assert await producer.read(*[end(number, each, ROLLBACK) for number, each in enumerate(sent)]) == {}
    assert (found.pending(), op_bodies(found)) == ([], [b"0,1,2,3,4,5"])


async def test_a_group_that_fits_no_segment_ends_one_by_one() -> None:
    found = await sellers(segment_bytes=8192, page_bytes=8192, cache_bytes=1 << 20)
    producer = Producer(found)
    frames = [half(number, f"PGROUP\x01P\x02A\x01{'a' * 1500}\x02") for number in range(8)]
    sent = list((await producer.read(*frames)).values())
    assert await producer.read(*[end(number, each) for number, each in enumerate(sent)]) == {}
    assert found.stored() == [f"U{number}" for number in range(8)]
    assert found.pending() == []


async def test_a_delayed_message_passes_the_later_stages_when_it_is_committed_with_others() -> None:
    found = await sellers()
    delayed: list[bytes] = []

    def delay(message: Message) -> Message:
        delayed.append(message.body)
        return message

    found.broker.set_stages([*found.broker.stages.pairs, ("timer", Stage(delay, ("DELAY",)))])
    producer = Producer(found)
    frames = [half(number, f"PGROUP\x01P\x02{'DELAY' if number == 2 else 'A'}\x013\x02") for number in range(5)]
    sent = list((await producer.read(*frames)).values())
    assert (len(sent), delayed) == (5, [b"body 2"]), "the stub sees half messages too"
    await producer.read(*[end(number, each) for number, each in enumerate(sent)])
    assert delayed == [b"body 2"] * 2
    assert op_bodies(found) == [b"0,1,3,4", b"2"]
    assert found.broker.stages.after(NAME).words == ("DELAY",)


@pytest.mark.parametrize("who", ["a stage before", "a stage after", "a router"])
async def test_transactions_that_end_together_pass_a_stage_that_wants_every_message(who: str) -> None:
    """A router is one: light queues have it, which may index any message."""
    found = await sellers()
    seen: list[str] = []

    def see(message: Message) -> Message:
        seen.append(message.topic)
        return message

    def route(message: Message) -> Sequence[str]:
        seen.append(message.topic)
        return []

    pairs, wide = found.broker.stages.pairs, ("wide", Stage(see))
    stages = {"a stage before": [wide, *pairs], "a stage after": [*pairs, wide], "a router": pairs}
    producer = Producer(found)
    sent = list((await producer.read(*[half(number) for number in range(4)])).values())
    found.broker.set_stages(stages[who], [("light", Router(route))] if who == "a router" else [])
    ends = [end(number, each, ROLLBACK if number == 3 else COMMIT) for number, each in enumerate(sent)]
    assert await producer.read(*ends) == {}
    assert (sorted(found.stored()), found.pending()) == (["U0", "U1", "U2"], [])
    assert seen.count(TOPIC) == (0 if who == "a stage before" else 3), "it saw these when they were prepared"


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_an_end_together_whose_commit_failed_can_be_repeated(flush: str) -> None:
    found = await sellers(flush=flush)
    placed = [found.prepare(f"k{number}") for number in range(3)]
    await found.settle()
    ends = [(await found.find(each), True) for each in placed]
    assert found.held.end_together(ends) == []
    assert found.held.end_together(ends) == [0, 1, 2], "they are ending"
    found.store.committer.take_back(0)
    found.store.tail.rewind(found.store.written)
    assert found.held.end_together(ends) == []
    await found.settle()
    assert found.stored() == ["k0", "k1", "k2"]
