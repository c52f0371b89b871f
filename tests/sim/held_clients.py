"""Simulated clients of messages that the broker holds: delays and recalls, transactions, retries and pops."""

import random
from typing import TYPE_CHECKING, Final

import orjson
import trio
from tests.remoting.pop_talk import Popped, ack_ext, pop_ext, popped

from martlet.records.codec import decode_records
from martlet.testing.clock import START_MS
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.headers import PULL_SUBSCRIPTION, PullHeader
from martlet_remoting.wire.packets import Command

from .bodies import LEVELS_S, hold_of, key_of, make_body, producer_group
from .clients import GIVE_UP_S, Client, Gone, send_command

if TYPE_CHECKING:
    from .world import World

__all__ = ["delay", "give_back", "pop", "transact"]

COMMIT, ROLLBACK = 8, 12
DELAY_MS_MAX: Final = 8000
PULLED: Final = 8


def _topic(world: "World", chance: random.Random) -> tuple[str, int]:
    return f"topic-{chance.randrange(world.plan.topics)}", chance.randrange(world.plan.queues)


async def _pause(world: "World", chance: random.Random) -> None:
    await trio.sleep(chance.choice([0.01, 0.1, 0.5]))
    if chance.random() < 0.05 and not world.calm:
        await trio.sleep(chance.uniform(2, 10))


# delays


async def delay(world: "World", name: str, chance: random.Random) -> None:
    """Send delayed messages until it is calm, recall some of them, and wait until all have been delivered."""
    client = Client(world, chance)
    waiting: dict[bytes, tuple[str, int]] = {}
    recalls: dict[bytes, Command] = {}
    number = 0
    while not world.calm or waiting:
        for _ in range(chance.randint(1, 4) if len(waiting) < 8 and not world.calm else 0):
            number += 1
            waiting[make_body(name, number, chance, _delay(chance))] = _topic(world, chance)
        try:
            if not client.connected:
                await client.connect()
            await _send_delayed(client, world.plan.light, waiting, recalls)
            await _recall(client, recalls)
        except Gone:
            client.close()
        await _pause(world, chance)
    client.close()
    while world.checker.held.missing(f"{name}-".encode()):  # noqa: ASYNC110, clients get no notification
        await trio.sleep(0.5)
    world.finished(produces=True)


def _delay(chance: random.Random) -> str:
    kind = chance.choice("LMD")
    if kind == "L":
        return f"L{chance.randint(1, len(LEVELS_S))}"
    ms = chance.randint(1, DELAY_MS_MAX)
    return f"M{ms}" if kind == "M" else f"D{START_MS + int(trio.current_time() * 1000) + ms}"


async def _send_delayed(
    client: Client, light: bool, waiting: dict[bytes, tuple[str, int]], recalls: dict[bytes, Command]
) -> None:
    sends = {body: send_command(*place, light, body) for body, place in waiting.items()}
    asked = await client.ask(*sends.values())
    for body, opaque in zip(sends, asked, strict=True):
        answer = await client.answer(opaque)
        if answer.code == ResponseCode.SUCCESS:
            topic, _ = waiting.pop(body)
            handle = answer.text("recallHandle", "")
            if handle and client.chance.random() < 0.2:
                # The body is for the checker; the broker ignores it.
                recalls[body] = Command(RequestCode.RECALL_MESSAGE, {"topic": topic, "recallHandle": handle}, body)


async def _recall(client: Client, recalls: dict[bytes, Command]) -> None:
    """Recall messages once; what is too late, or did not get an answer, is not tried again."""
    for body in list(recalls):
        command = recalls.pop(body)
        await client.answer((await client.ask(command))[0])


# transactions


async def transact(world: "World", name: str, chance: random.Random) -> None:
    """Begin and end transactions until it is calm, answer checks, and wait until all transactions have ended."""
    client = Client(world, chance)
    checks: dict[str, int] = {}
    number = 0
    while not world.calm or world.pending_transactions or world.checker.held.open_halves():
        try:
            if not client.connected:
                await client.connect()
                await _introduce(client, name)
            if not world.calm:
                bodies = [
                    make_body(name, number + each, chance, _intent(chance)) for each in range(chance.randint(1, 4))
                ]
                number += len(bodies)
                await _begin(world, client, bodies)
            await _answer_checks(client, checks)
        except Gone:
            client.close()
        await _pause(world, chance)
    client.close()
    world.finished(produces=True)


def _intent(chance: random.Random) -> str:
    return f"{chance.choice('CCCRRU')}{chance.choice([0, 0, 0, 1, 2])}"


async def _introduce(client: Client, name: str) -> None:
    body = orjson.dumps({"clientID": name, "producerDataSet": [{"groupName": f"group-{name}"}]})
    await client.answer((await client.ask(Command(RequestCode.HEART_BEAT, {}, body)))[0])


async def _begin(world: "World", client: Client, bodies: list[bytes]) -> None:
    """Send half messages and end some of their transactions: with and without an answer, some only after a check."""
    sends = [send_command(*_topic(world, client.chance), world.plan.light, body) for body in bodies]
    asked = await client.ask(*sends)
    ends: list[Command] = []
    for body, opaque in zip(bodies, asked, strict=True):
        answer = await client.answer(opaque)
        hold = hold_of(body)
        assert hold is not None
        if answer.code == ResponseCode.SUCCESS and hold.kind != "U" and not hold.number:
            position = int(answer.text("msgId")[-16:], 16)
            ends.append(_end(body, answer.integer("queueOffset"), position, checked=False))
    if client.chance.random() < 0.3:
        return  # all of them only after a check
    if client.chance.random() < 0.3:
        await trio.sleep(client.chance.uniform(0, 5))
    if client.chance.random() < 0.4:
        for end in ends:
            end.flag = FLAG_ONEWAY
        await client.ask(*ends)
    else:
        for opaque in await client.ask(*ends):
            await client.answer(opaque)


def _end(body: bytes, offset: int, position: int, *, checked: bool) -> Command:
    hold = hold_of(body)
    assert hold is not None
    ext = {
        "producerGroup": producer_group(body),
        "tranStateTableOffset": offset,
        "commitLogOffset": position,
        "commitOrRollback": COMMIT if hold.kind == "C" else ROLLBACK,
        "fromTransactionCheck": checked,
        "msgId": key_of(body),
        "transactionId": key_of(body),
    }
    return Command(RequestCode.END_TRANSACTION, {key: str(value) for key, value in ext.items()})


async def _answer_checks(client: Client, checks: dict[str, int]) -> None:
    """Answer the checks that arrive within a moment."""
    with trio.move_on_after(0.3):
        while True:
            await client.hear(GIVE_UP_S)
    asked, client.questions = client.questions, []
    for question in asked:
        if question.code != RequestCode.CHECK_TRANSACTION_STATE:
            continue
        (record,) = decode_records(question.body)
        hold = hold_of(record.body)
        assert hold is not None
        checks[question.text("msgId")] = seen = checks.get(question.text("msgId"), 0) + 1
        if hold.kind == "U" or seen <= hold.number:
            continue
        offset, position = question.integer("tranStateTableOffset"), question.integer("commitLogOffset")
        end = _end(record.body, offset, position, checked=True)
        await client.answer((await client.ask(end))[0])


# retries


async def give_back(world: "World", name: str, chance: random.Random) -> None:
    """Pull messages and give some of them back; end when all of those have come again."""
    client = Client(world, chance)
    group = f"group-{name}"
    retry = f"%RETRY%{group}"
    offsets = {_topic(world, chance): 0, (retry, 0): 0}
    while not world.calm or world.producing or world.checker.held.missing(b"", retry):
        try:
            if not client.connected:
                await client.connect()
            for place in offsets:
                offsets[place] = await _pull_and_fail(world, client, group, place, offsets[place])
        except Gone:
            client.close()
        await _pause(world, chance)
    client.close()
    world.finished()


async def _pull_and_fail(world: "World", client: Client, group: str, place: tuple[str, int], offset: int) -> int:
    """Pull some messages, give some of them back, and return the next offset."""
    header = PullHeader(group, *place, offset, PULLED, PULL_SUBSCRIPTION, 0, 0, "*")
    pull = Command(RequestCode.PULL_MESSAGE, {key: str(value) for key, value in header.to_ext().items()})
    answer = await client.answer((await client.ask(pull))[0])
    if answer.code == ResponseCode.SUCCESS and not world.calm:
        for record in decode_records(answer.body):
            if client.chance.random() < 0.2:
                ext = {"group": group, "offset": str(record.position), "originTopic": record.topic}
                level = str(client.chance.randint(1, len(LEVELS_S)))
                command = Command(RequestCode.CONSUMER_SEND_MSG_BACK, {**ext, "delayLevel": level}, record.body)
                await client.answer((await client.ask(command))[0])
    codes = ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_OFFSET_MOVED
    return answer.integer("nextBeginOffset") if answer.code in codes else offset


# pops


async def pop(world: "World", name: str, chance: random.Random) -> None:
    """Pop a topic, acknowledge most messages, and end when all are acknowledged."""
    client = Client(world, chance)
    group, (topic, _) = f"group-{name}", _topic(world, chance)
    for queue_id in range(world.plan.queues):
        world.checker.popped.follow(group, topic, queue_id)
    while not world.calm or world.producing or not _has_popped_all(world, group, topic):
        try:
            if not client.connected:
                await client.connect()
            await _pop_round(world, client, group, topic)
        except Gone:
            client.close()
        await _pause(world, chance)
    client.close()
    world.finished()


def _has_popped_all(world: "World", group: str, topic: str) -> bool:
    """Whether the group has nothing left to acknowledge."""
    life = world.life
    if life is None or not life.serving:
        return False
    queues = life.broker.store.queues.topics.get(topic, {}).values()
    return all(life.broker.groups.offsets.get(group, topic, queue.queue_id) >= queue.next_offset for queue in queues)


async def _pop_round(world: "World", client: Client, group: str, topic: str) -> None:
    chance = client.chance
    wait_ms, count = chance.choice([0, 0, 3000]), chance.choice([1, 4, 32])
    invisible_ms = chance.choice([200, 1000, 6000])
    ext = pop_ext(
        topic, consumerGroup=group, invisibleTime=str(invisible_ms), pollTime=str(wait_ms), maxMsgNums=str(count)
    )
    answer = await client.answer((await client.ask(Command(RequestCode.POP_MESSAGE, ext)))[0], wait_ms / 1000 + 6)
    if answer.code != ResponseCode.SUCCESS:
        return
    # Not in the calm: the leases would end meanwhile, and a thousand messages would take longer than the calm does.
    if chance.random() < 0.1 and not world.calm:
        await trio.sleep(chance.uniform(0, 8))
    questions = [each for message in popped(answer) for each in _settling(world, chance, group, message)]
    for opaque in await client.ask(*questions) if questions else ():
        await client.answer(opaque)


def _settling(world: "World", chance: random.Random, group: str, message: Popped) -> list[Command]:
    """Acknowledge a message, or change its invisible time, or let it return."""
    luck = 1.0 if world.calm else chance.random()
    if luck < 0.2:
        return []
    ext = {key: str(value) for key, value in ack_ext(message, consumerGroup=group).items()}
    if luck < 0.3:
        invisible_ms = str(chance.choice([0, 500, 5000]))
        return [Command(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, {**ext, "invisibleTime": invisible_ms})]
    return [Command(RequestCode.ACK_MESSAGE, ext)]
