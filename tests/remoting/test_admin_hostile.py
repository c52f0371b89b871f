"""Every administrative request is answered, whatever it contains, and has no other effect."""

import random

import orjson
import pytest
import trio

from martlet.app import saving
from martlet.runtime.steps import finish_now
from martlet_remoting.handlers import admin
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.requests import REQUESTS, SAVED, answer, answer_when_saved
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codec import decode_frame
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import Harness, joined, keep_nothing, send_ext


def words(text: str) -> list[str]:
    return text.split()


NAMES = words(
    "topic group consumerGroup producerGroup groupName clientId clientAddr msgId queueId index count offset timestamp "
    "isForce readQueueNums writeQueueNums perm order attributes topicSysFlag topicFilterType defaultTopic statsName "
    "statsKey topicSeq maxTopicNum dataVersion groupSeq maxGroupNum filterGroups compareGroup srcGroup destGroup "
    "offline isOrder topicList cleanOffset removeOffset readable jstackEnable namespace key value cluster clusterName "
    "brokerName brokerAddr brokerId haServerAddr heartbeatTimeoutMillis enableActingMaster compressed bodyCrc32 "
    "acceptStandardJsonOnly __ZONE_MODE __ZONE_NAME"
)
NUMBERS = words("0 1 -1 7 4294967296 9223372036854775807 -9223372036854775808 99999999999999999999 1e5 nan")
TEXTS = words(
    'T G c a,b;c true false TRUE null {} {"counter":1} +message.type=FIFO -a + = %RETRY%G TBW102 TOPIC_PUT_NUMS '
    "7F0000010000C6DF0000000000000000"
)
ODD: list[object] = ["", " ", "\x00", "\ud7ff", "x" * 300, 5, -1, True, False, None, 1.5, [], {"a": 1}]
VALUES: list[object] = [*NUMBERS, *TEXTS, *ODD]
JSON: list[object] = [None, True, 0, -1, 1 << 62, (1 << 64) - 1, -(1 << 63), 1.5, 1e308]
JSON += ["", "T", "\x00", "\ud7ff", "9" * 30, [], {}, [[]], [{}], {"a": {}}]
PASSED_ON = {307, 309, 221, 223}  # to a consumer, whose answer is the administrator's
KEYS = words(
    "topicConfigList groupConfigList topicName groupName attributes readQueueNums perm order retryMaxTimes queueDatas "
    "topicConfigSerializeWrapper topicConfigTable dataVersion counter filterServerList topicQueueMappingInfoMap T U"
)


def made_up(dice: random.Random, depth: int = 0) -> object:
    """A random JSON value with keys that requests use."""
    if depth > 3 or dice.random() < 0.3:
        return dice.choice(JSON)
    if dice.random() < 0.3:
        return [made_up(dice, depth + 1) for _ in range(dice.randrange(3))]
    return {dice.choice(KEYS): made_up(dice, depth + 1) for _ in range(dice.randrange(5))}


def made_up_body(dice: random.Random) -> bytes:
    choice = dice.random()
    if choice < 0.3:
        return b""
    if choice < 0.8:
        return orjson.dumps(made_up(dice))
    if choice < 0.9:
        value = dice.choice((b"true", b"", b"no", b"\\ud800", b"\\udc00x", b"\\ud83d\\ude00", b"\\u0000"))
        name = dice.choice((b"autoCreateTopicEnable", b"deleteWhen", b"brokerName", b"x\\\n=\\u12\n", value))
        return b"%b=%b\n" % (name, value)
    return dice.randbytes(dice.randrange(40))


def made_up_command(dice: random.Random, codes: list[int]) -> Command:
    ext = {name: dice.choice(VALUES) for name in dice.sample(NAMES, dice.randrange(len(NAMES)))}
    return Command(dice.choice(codes), ext, made_up_body(dice), dice.randrange(1 << 31), version=dice.randrange(600))


@pytest.mark.parametrize("seed", range(4))
async def test_every_administrative_request_is_answered_or_passed_on(harness: Harness, seed: int) -> None:
    dice = random.Random(seed)
    codes = [code for code in admin.TABLE if code != RequestCode.DELETE_EXPIRED_COMMITLOG]
    client = harness.client()
    harness.topic("T")
    await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("T"), b"body")
    await client.heartbeat("c", "G", "T")
    for _ in range(400):
        command = made_up_command(dice, codes)
        client.handle(command)
        await harness.step()
        passed_on = list(client.requests)
        client.requests.clear()
        found = client.answers.pop(command.opaque, None)
        if found is None:
            assert [request.code for request in passed_on] == [command.code], command
            assert command.code in PASSED_ON
        else:
            assert found.code == 0 or found.remark, command
    assert (await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)).code == 0


@pytest.mark.parametrize("seed", range(4))
def test_every_request_to_the_name_server_is_answered(seed: int) -> None:
    async def ask() -> None:
        dice = random.Random(seed)
        server = NameServer(NameServerConfig(), keep_nothing)
        codes = [*REQUESTS, *SAVED]
        for _ in range(2000):
            command = made_up_command(dice, codes)
            saved = command.code in SAVED
            frame = (await answer_when_saved(server, command)) if saved else finish_now(answer(server, "line", command))
            found = decode_frame(joined(frame))
            assert found.opaque == command.opaque
            assert found.code == 0 or found.remark, command
        await trio.lowlevel.checkpoint()

    trio.run(ask)


HUGE = b"9" * 30


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, b'{groupName:"g",brokerId:%b}' % HUGE),
        (RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, b'{topicConfigList:[{topicName:"x",topicSysFlag:%b}]}' % HUGE),
        (
            RequestCode.HEART_BEAT,
            b'{clientID:"c",consumerDataSet:[{groupName:"g",subscriptionDataSet:[{topic:"T",subVersion:-%b}]}]}' % HUGE,
        ),
    ],
)
async def test_a_number_over_64_bits_comes_into_no_table(harness: Harness, code: int, body: bytes) -> None:
    answer = await harness.client().ask(code, body=body)
    assert answer.code == 1
    assert "64 bits" in (answer.remark or "")
    saving.save(harness.broker)  # it could not be written


async def test_a_table_that_cannot_be_written_does_not_end_the_broker(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.broker.topics.update("x", sys_flag=1 << 80)
    await saving._try_to_save(harness.broker, offsets=True)
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(
    "line", [b"autoCreateTopicEnable=\\ud800", b"\\udc00=true", b"brokerName=\\ud800x", b"x=\\ude00\\ud83d"]
)
async def test_half_a_character_is_refused_by_both_ports(harness: Harness, line: bytes) -> None:
    refused = await harness.client().ask(RequestCode.UPDATE_BROKER_CONFIG, body=line)
    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert "half of a surrogate pair" in (refused.remark or "")
    server = NameServer(NameServerConfig(), keep_nothing)
    command = Command(RequestCode.UPDATE_NAMESRV_CONFIG, {}, line)
    told = decode_frame(joined(finish_now(answer(server, "line", command))))
    assert told.code == ResponseCode.SYSTEM_ERROR
    assert "half of a surrogate pair" in (told.remark or "")
