"""Simulated clients: they speak real frames, keep several questions open, give up, come back and ask again."""

import random
from typing import TYPE_CHECKING, Final, final

import trio

from martlet.records.layout import PREPARED
from martlet.testing.links import Caller
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codec import FrameBuffer, encode_binary_command, encode_command
from martlet_remoting.wire.codes import FLAG_RESPONSE, RequestCode, ResponseCode
from martlet_remoting.wire.headers import PULL_SUBSCRIPTION, PULL_SUSPEND, PullHeader
from martlet_remoting.wire.packets import Command

from .bodies import LIGHT_TOPICS, hold_of, make_body, properties_of

if TYPE_CHECKING:
    from .world import World

__all__ = ["GIVE_UP_S", "Client", "Gone", "consume", "produce", "send_command"]

GIVE_UP_S: Final = 6.0
SUSPEND_MS: Final = 15_000


class Gone(Exception):
    """The connection does not do any more; dial again."""


@final
class Client:
    """One connection, and the questions that are open on it."""

    def __init__(self, world: "World", chance: random.Random) -> None:
        self._world = world
        self.chance = chance
        self._caller: Caller | None = None
        self._frames = FrameBuffer()
        self._opaque = 0
        self.answers: dict[int, Command] = {}
        self.questions: list[Command] = []  # those of the broker

    async def connect(self) -> None:
        """Dial until somebody answers."""
        self.close()
        while (link := self._world.dial()) is None:  # noqa: ASYNC110, a client polls: nobody tells it
            await trio.sleep(self.chance.uniform(0.05, 0.5))
        self._caller = Caller(link.near)
        self._frames = FrameBuffer()
        self.answers.clear()
        self.questions.clear()

    def close(self) -> None:
        if self._caller is not None:
            self._caller.close()
            self._caller = None

    @property
    def connected(self) -> bool:
        return self._caller is not None

    async def ask(self, *questions: Command) -> list[int]:
        """Send *questions* in one go and return their numbers. Raises `Gone`."""
        frames = b""
        for question in questions:
            self._opaque += 1
            question.opaque = self._opaque
            binary = question.code == RequestCode.PULL_MESSAGE and self.chance.random() < 0.3
            frames += encode_binary_command(question) if binary else encode_command(question)
        assert self._caller is not None
        try:
            with trio.fail_after(GIVE_UP_S):
                await self._caller.send(frames)
        except (OSError, trio.ClosedResourceError, trio.TooSlowError) as error:
            raise Gone from error
        return [question.opaque for question in questions]

    async def hear(self, seconds: float) -> None:
        """Take what comes next. Raises `Gone` when nothing does for so long."""
        assert self._caller is not None
        try:
            with trio.fail_after(seconds):
                data = await self._caller.receive()
        except (OSError, trio.ClosedResourceError, trio.TooSlowError) as error:
            raise Gone from error
        if not data:
            raise Gone
        self._frames.receive_data(data)
        for command in self._frames.commands():
            if command.flag & FLAG_RESPONSE:
                self.answers[command.opaque] = command
            else:
                self.questions.append(command)

    async def answer(self, number: int, seconds: float = GIVE_UP_S) -> Command:
        """Wait for the answer to question *number*."""
        until = trio.current_time() + seconds
        while number not in self.answers:
            await self.hear(until - trio.current_time())
        return self.answers.pop(number)


def send_command(topic: str, queue_id: int, light: bool, body: bytes, *more: bytes) -> Command:
    """The SEND_MESSAGE_V2 of one message, or the SEND_BATCH_MESSAGE of several."""
    hold = hold_of(body)
    code = RequestCode.SEND_BATCH_MESSAGE if more else RequestCode.SEND_MESSAGE_V2
    ext = {
        "a": "simulated",
        "b": topic,
        "c": "TBW102",
        "d": "4",
        "e": str(queue_id),
        "f": str(PREPARED if hold is not None and hold.is_half else 0),
        "g": "1700000000000",
        "h": "0",
        "i": properties_of(body, light),
        "j": "0",
        "k": "false",
        "m": "true" if more else "false",
    }
    if more:
        body = encode_batch([BatchMessage(each, properties_of(each, light).encode()) for each in (body, *more)])
    return Command(code, ext, body)


async def produce(world: "World", name: str, chance: random.Random) -> None:
    """Send until it is calm, then see to it that everything was acknowledged."""
    client = Client(world, chance)
    waiting: dict[int, tuple[bytes, str, int]] = {}
    number = 0
    while not world.calm or waiting:
        if len(waiting) < 8 and not world.calm:
            for _ in range(chance.choice([1, 1, 2, 8])):
                number += 1
                place = f"topic-{chance.randrange(world.plan.topics)}", chance.randrange(world.plan.queues)
                waiting[number] = (make_body(name, number, chance), *place)
        try:
            if not client.connected:
                await client.connect()
            await _send_all(client, waiting, world.plan.light)
        except Gone:
            client.close()
        await trio.sleep(chance.choice([0.0, 0.01, 0.1, 0.5]))
        if chance.random() < 0.05 and not world.calm:
            await trio.sleep(chance.uniform(2, 10))  # nothing new: only what consumers do moves the disk
    client.close()
    world.finished(produces=True)


async def _send_all(client: Client, waiting: dict[int, tuple[bytes, str, int]], light: bool) -> None:
    together = client.chance.random() < 0.3
    sends: dict[tuple[int, ...], Command] = {}
    for place in sorted({(topic, queue_id) for _, topic, queue_id in waiting.values()}):
        numbers = tuple(number for number, (_, *at) in waiting.items() if tuple(at) == place)
        for some in [numbers] if together else [(number,) for number in numbers]:
            sends[some] = send_command(*place, light, *(waiting[number][0] for number in some))
    asked = await client.ask(*sends.values())
    for numbers, opaque in zip(sends, asked, strict=True):
        answer = await client.answer(opaque)
        if answer.code == ResponseCode.SUCCESS:
            for number in numbers:
                del waiting[number]


async def consume(world: "World", name: str, chance: random.Random) -> None:
    """Pull one queue after the other's answer, commit now and then, and end when everything was read in the calm."""
    client = Client(world, chance)
    plan = world.plan
    places = [(f"topic-{t}", q) for t in range(plan.topics) for q in range(plan.queues)]
    places += [(name, 0) for name in LIGHT_TOPICS] if plan.light else []
    chance.shuffle(places)
    mine = places[: chance.randint(1, len(places))]
    offsets = dict.fromkeys(mine, 0)
    expression = chance.choice(["*", "*", "*", "t1"])
    asked: dict[tuple[str, int], int] = {}
    counted = False
    while True:
        try:
            if not client.connected:
                asked.clear()
                await client.connect()
            await _pull_round(world, client, name, expression, chance, offsets, asked)
        except Gone:
            client.close()
        if world.calm and not counted and _has_all(world, offsets):
            counted = True
            world.finished()
        await trio.sleep(chance.choice([0.0, 0.0, 0.05, 0.5]) if not world.calm else 0.0)


def _has_all(world: "World", offsets: dict[tuple[str, int], int]) -> bool:
    """Whether everything known of these queues was read; producers may still add to it."""
    return not world.producing and all(offset >= world.checker.ends[place] for place, offset in offsets.items())


async def _pull_round(
    world: "World",
    client: Client,
    name: str,
    expression: str,
    chance: random.Random,
    offsets: dict[tuple[str, int], int],
    asked: dict[tuple[str, int], int],
) -> None:
    for place, offset in offsets.items():
        if place not in asked:
            asked[place] = (await client.ask(_pull(name, expression, place, offset, chance)))[0]
    if chance.random() < 0.03 and not world.calm:
        await trio.sleep(chance.uniform(0, 5))  # somebody who does not read for a while
    with trio.move_on_after(chance.uniform(0.1, 2)):
        while not any(opaque in client.answers for opaque in asked.values()):
            await client.hear(SUSPEND_MS / 1000 + GIVE_UP_S)
    for place, opaque in list(asked.items()):
        answer = client.answers.pop(opaque, None)
        if answer is not None:
            del asked[place]
            _take(place, answer, offsets)
            if chance.random() < 0.3:
                await client.ask(_commit(name, place, offsets[place]))


def _take(place: tuple[str, int], answer: Command, offsets: dict[tuple[str, int], int]) -> None:
    if answer.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_OFFSET_MOVED):
        offsets[place] = answer.integer("nextBeginOffset")


def _pull(name: str, expression: str, place: tuple[str, int], offset: int, chance: random.Random) -> Command:
    sys_flag = PULL_SUBSCRIPTION | PULL_SUSPEND
    most = chance.choice([1, 4, 32])
    header = PullHeader(f"group-{name}", *place, offset, most, sys_flag, 0, SUSPEND_MS, expression)
    return Command(RequestCode.PULL_MESSAGE, {key: str(value) for key, value in header.to_ext().items()})


def _commit(name: str, place: tuple[str, int], offset: int) -> Command:
    ext = {
        "consumerGroup": f"group-{name}",
        "topic": place[0],
        "queueId": str(place[1]),
        "commitOffset": str(offset),
    }
    return Command(RequestCode.UPDATE_CONSUMER_OFFSET, ext)
