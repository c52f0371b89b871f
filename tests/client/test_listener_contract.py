"""A listener that returns a wrong value gets an error at once; none of its messages is returned or lost."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import trio
from trio.testing import MockClock

from martlet_client import (
    ClientClosed,
    ConsumeFrom,
    MessageModel,
    Outcome,
    PushConsumer,
    ReceivedMessage,
    aio,
    blocking,
)
from martlet_remoting.wire.codes import RequestCode

from .fake import Cluster, ThreadCluster
from .listening import Listener

GROUP = "G"
ALL = {"T": "*"}
WRONG = "listener returned True for message .* of topic 'T'; return Outcome.SUCCESS, Outcome.RETRY or None"
PATIENCE_S = 120.0


def returning(result: object) -> Any:
    """A listener that returns *result*, whatever the types say."""

    async def listen(message: ReceivedMessage) -> object:
        return result

    return listen


@pytest.mark.parametrize(
    "options",
    [{}, {"orderly": True}, {"model": MessageModel.BROADCASTING}],
    ids=["concurrent", "ordered", "broadcasting"],
)
async def test_a_wrong_result_ends_the_consumer_with_a_sentence(
    cluster: Cluster, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    for number in range(20):
        cluster.broker.put("T", 0, b"%d" % number)
    with pytest.raises(TypeError, match=WRONG):
        async with PushConsumer(
            cluster.settings(), GROUP, returning(True), ALL, consume_from=ConsumeFrom.FIRST, concurrency=1, **options
        ):
            await trio.sleep_forever()
    assert [
        record.levelno for record in caplog.records if "consumer stops: listener returned" in record.getMessage()
    ] == [logging.ERROR]
    assert cluster.broker.asked(RequestCode.CONSUMER_SEND_MSG_BACK) == []
    assert cluster.broker.asked(RequestCode.SEND_MESSAGE_V2) == []
    assert cluster.broker.offsets.get((GROUP, "T", 0), 0) == 0
    # It closed in order: brokers know that the member left.
    assert cluster.broker.members[GROUP] == {}


@pytest.mark.parametrize("result", [True, False, 0, "SUCCESS", b"", Ellipsis, Outcome, [Outcome.SUCCESS]], ids=repr)
async def test_only_outcomes_and_none_are_results(cluster: Cluster, autojump_clock: MockClock, result: object) -> None:
    cluster.broker.put("T", 0, b"x")
    with pytest.raises(TypeError, match="listener returned"):
        async with PushConsumer(cluster.settings(), GROUP, returning(result), ALL, consume_from=ConsumeFrom.FIRST):
            await trio.sleep_forever()


async def test_a_generator_is_no_result(cluster: Cluster, autojump_clock: MockClock) -> None:
    def listen(message: ReceivedMessage) -> Any:
        yield message

    cluster.broker.put("T", 0, b"x")
    with pytest.raises(TypeError, match="listener returned <generator"):
        async with PushConsumer(cluster.settings(), GROUP, listen, ALL, consume_from=ConsumeFrom.FIRST):
            await trio.sleep_forever()


async def test_what_was_done_before_is_committed_and_the_rest_comes_again(
    cluster: Cluster, autojump_clock: MockClock
) -> None:
    for number in range(5):
        cluster.broker.put("T", 0, b"%d" % number)
    seen: list[bytes] = []

    async def listen(message: ReceivedMessage) -> Any:
        seen.append(message.body)
        return None if message.body < b"3" else "done"

    with pytest.raises(TypeError, match="listener returned 'done'"):
        async with PushConsumer(cluster.settings(), GROUP, listen, ALL, consume_from=ConsumeFrom.FIRST, concurrency=1):
            await trio.sleep_forever()
    assert seen == [b"0", b"1", b"2", b"3"]
    assert cluster.broker.offsets[GROUP, "T", 0] == 3
    corrected = Listener()
    async with PushConsumer(cluster.settings(), GROUP, corrected, ALL):
        await corrected.wait_count(2)
    assert sorted(corrected.bodies) == [b"3", b"4"]
    assert {message.reconsume_times for message in corrected.messages} == {0}


async def test_an_error_of_the_program_and_a_wrong_result_are_both_told(
    cluster: Cluster, autojump_clock: MockClock
) -> None:
    cluster.broker.put("T", 0, b"x")
    called = trio.Event()

    async def listen(message: ReceivedMessage) -> Any:
        called.set()
        await trio.sleep(1)
        return 5

    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012
        async with PushConsumer(cluster.settings(), GROUP, listen, ALL, consume_from=ConsumeFrom.FIRST):
            await called.wait()
            raise KeyError("mine")
    assert {type(error) for error in caught.value.exceptions} == {TypeError, KeyError}


async def test_a_broker_that_hands_over_one_message_is_told_as_well(
    cluster: Cluster, autojump_clock: MockClock
) -> None:
    with pytest.raises(TypeError, match=WRONG):  # noqa: PT012
        async with PushConsumer(cluster.settings("me"), GROUP, returning(True), ALL):
            cluster.broker.put("T", 1, b"x")
            record = cluster.broker.queues["T", 1][0]
            ext: dict[str, object] = {"consumerGroup": GROUP, "brokerName": "broker-a", "msgId": "x", "clientId": "me"}
            answer = await cluster.broker.members[GROUP]["me"].ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, ext, record)
            body = orjson.loads(answer.body)
            assert body["consumeResult"] == "CR_THROW_EXCEPTION"
            assert "listener returned True" in body["remark"]
            await trio.sleep_forever()


def one_message(cluster: Cluster) -> None:
    cluster.broker.put("T", 0, b"x")


def test_plain_code_is_told_by_its_calls_and_by_its_with_block(caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()

    def listen(message: ReceivedMessage) -> Any:
        called.set()
        return True

    def leave() -> None:
        settings = ThreadCluster(one_message).settings()
        with blocking.PushConsumer(settings, GROUP, listen, ALL, consume_from=ConsumeFrom.FIRST) as consumer:
            assert called.wait(PATIENCE_S)
            ended = threading.Event()
            consumer._portal.when_failed(ended.set)
            assert ended.wait(PATIENCE_S)
            with pytest.raises(ClientClosed, match="client has stopped: listener returned True"):
                consumer.subscribe("U")

    with pytest.raises(TypeError, match=WRONG):
        leave()
    assert "consumer stops: listener returned True" in caplog.text


def async_wrong() -> Any:
    async def listen(message: ReceivedMessage) -> object:
        return True

    return listen


def plain_wrong() -> Any:
    return lambda message: True


@pytest.mark.parametrize("make", [async_wrong, plain_wrong])
def test_asyncio_code_is_told_where_it_waits(make: Callable[[], Any]) -> None:
    async def main() -> None:
        settings = ThreadCluster(one_message).settings()
        with pytest.raises(TypeError, match=WRONG):
            async with aio.PushConsumer(settings, GROUP, make(), ALL, consume_from=ConsumeFrom.FIRST):
                await asyncio.wait_for(asyncio.Event().wait(), PATIENCE_S)
        # The cancellation that ended the wait is over.
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)

    asyncio.run(main())
