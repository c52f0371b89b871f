"""Plain code and asyncio get the same results, errors and messages as trio does."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, assert_type

import pytest
import trio

import martlet_client as client
from martlet_client import (
    ClientClosed,
    ConsumeFrom,
    Message,
    MessageRefused,
    Outcome,
    ReceivedMessage,
    SendFailed,
    SendResult,
    SendStatus,
    aio,
    blocking,
)
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

from .fake import Cluster, Reply, ThreadCluster
from .test_request_reply import GONE, answer_with_pong, received

PATIENCE_S = 120.0


def three_messages(cluster: Cluster) -> None:
    for number in range(3):
        cluster.broker.put("T", 0, b"%d" % number)


# Plain code


def test_blocking_producer_sends_and_raises() -> None:
    with blocking.Producer(ThreadCluster().settings(), "P", send_timeout_s=PATIENCE_S, retries=0) as producer:
        result = producer.send(Message("T", b"x"))
        assert result.status is SendStatus.OK
        with pytest.raises(MessageRefused, match="no body"):
            producer.send(Message("T", b""))
        assert len(producer.queues("T")) == 4
        batch = producer.send_batch([Message("T", b"a"), Message("T", b"b")])
        assert batch.message_id.count(",") == 1


def test_blocking_client_is_used_from_many_threads() -> None:
    found: list[str] = []
    with blocking.Producer(ThreadCluster().settings(), "P", send_timeout_s=PATIENCE_S) as producer:

        def send() -> None:
            found.extend(producer.send(Message("T", b"x")).message_id for _ in range(20))

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert len(set(found)) == 80


def test_blocking_requests_and_replies() -> None:
    settings = ThreadCluster(answer_with_pong).settings()
    with blocking.Producer(settings, "P", retries=0, send_timeout_s=PATIENCE_S) as producer:
        assert producer.request(Message("T", b"ping")).body == b"pong"
        with pytest.raises(SendFailed, match="channel of <gone> not found"):
            producer.reply(received(GONE), b"x")


def test_blocking_consumer_calls_the_listener_in_a_thread() -> None:
    got: list[bytes] = []
    done = threading.Event()

    def listener(message: ReceivedMessage) -> None:
        got.append(message.body)
        if len(got) == 3:
            done.set()

    settings = ThreadCluster(three_messages).settings()
    with blocking.PushConsumer(settings, "G", listener, {"T": "*"}, consume_from=ConsumeFrom.FIRST) as consumer:
        assert done.wait(PATIENCE_S)
        assert any(queue.topic == "T" for queue in consumer.assigned)
    assert sorted(got) == [b"0", b"1", b"2"]


def test_blocking_pull_consumer_reads_and_seeks() -> None:
    with blocking.PullConsumer(ThreadCluster(three_messages).settings(), "G") as consumer:
        queue = consumer.queues("T")[0]
        assert [message.body for message in consumer.read(queue)] == [b"0", b"1", b"2"]
        assert next(consumer.read(queue, 1)).body == b"1"
        consumer.seek(queue, 2)
        assert [message.body for message in consumer.poll(queue).messages] == [b"2"]
        assert consumer.position(queue) == 3
        assert consumer.committed(queue) is None
        consumer.commit(queue)
        assert consumer.committed(queue) == 3


def test_blocking_admin_answers() -> None:
    with blocking.Admin(ThreadCluster().settings()) as admin:
        assert admin.topics() == ["T", "TBW102"]
        assert admin.cluster().masters() == {"broker-a": "a:1"}


def test_blocking_client_says_when_it_is_not_open() -> None:
    producer = blocking.Producer(ThreadCluster().settings(), "P", send_timeout_s=PATIENCE_S)
    with pytest.raises(ClientClosed, match="not open"):
        producer.send(Message("T", b"x"))
    with producer:
        producer.send(Message("T", b"x"))
    with pytest.raises(ClientClosed):
        producer.send(Message("T", b"x"))
    with pytest.raises(ClientClosed, match="opened before"), producer:
        pass


def test_name_server_that_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="write HOST:PORT"):
        blocking.Producer("nowhere", "P")
    with pytest.raises(ValueError, match="write HOST:PORT"):
        blocking.Producer(";", "P")


# asyncio


def test_asyncio_requests_and_replies() -> None:
    async def main() -> None:
        settings = ThreadCluster(answer_with_pong).settings()
        async with aio.Producer(settings, "P", retries=0, send_timeout_s=PATIENCE_S) as producer:
            assert (await producer.request(Message("T", b"ping"))).body == b"pong"
            with pytest.raises(SendFailed, match="channel of <gone> not found"):
                await producer.reply(received(GONE), b"x")

    asyncio.run(main())


def test_asyncio_producer_sends_and_raises() -> None:
    async def main() -> None:
        async with aio.Producer(ThreadCluster().settings(), "P", send_timeout_s=PATIENCE_S) as producer:
            results = await asyncio.gather(*(producer.send(Message("T", b"x")) for _ in range(10)))
            assert len({result.message_id for result in results}) == 10
            with pytest.raises(MessageRefused, match="no body"):
                await producer.send(Message("T", b""))

    asyncio.run(main())


def test_asyncio_cancellation_reaches_the_call() -> None:
    arrived = threading.Event()

    def silent(cluster: Cluster) -> None:
        cluster.broker.overrides[RequestCode.SEND_MESSAGE_V2] = lambda command: arrived.set()

    place = ThreadCluster(silent)

    async def main() -> None:
        async with aio.Producer(place.settings(), "P", send_timeout_s=3600.0) as producer:
            call = asyncio.create_task(producer.send(Message("T", b"x")))
            assert await asyncio.to_thread(arrived.wait, PATIENCE_S)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert place.cluster is not None
            place.cluster.broker.overrides.clear()
            await producer.send(Message("T", b"y"))

    asyncio.run(main())


def test_asyncio_listener_runs_in_the_loop() -> None:
    async def main() -> None:
        here = threading.get_ident()
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        got: list[tuple[bytes, int]] = []

        async def listener(message: ReceivedMessage) -> Outcome:
            assert threading.get_ident() == here
            assert asyncio.get_running_loop() is loop
            await asyncio.sleep(0)
            got.append((message.body, message.reconsume_times))
            if len(got) == 4:
                done.set()
            return Outcome.RETRY if (message.body, message.reconsume_times) == (b"1", 0) else Outcome.SUCCESS

        settings = ThreadCluster(three_messages).settings()
        async with aio.PushConsumer(settings, "G", listener, {"T": "*"}, consume_from=ConsumeFrom.FIRST):
            await asyncio.wait_for(done.wait(), PATIENCE_S)
        assert sorted(got) == [(b"0", 0), (b"1", 0), (b"1", 1), (b"2", 0)]

    asyncio.run(main())


def test_asyncio_pull_consumer_reads() -> None:
    async def main() -> None:
        async with aio.PullConsumer(ThreadCluster(three_messages).settings(), "G") as consumer:
            queue = (await consumer.queues("T"))[0]
            assert [message.body async for message in consumer.read(queue)] == [b"0", b"1", b"2"]
            assert (await consumer.pull(queue, 1, messages_max=1)).messages[0].body == b"1"

    asyncio.run(main())


def test_asyncio_error_of_the_body_comes_out_as_it_is() -> None:
    async def main() -> None:
        async with aio.Producer(ThreadCluster().settings(), "P", send_timeout_s=PATIENCE_S):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(main())


def test_asyncio_leaving_waits_for_the_client_however_often_it_is_cancelled() -> None:
    leaving: Future[Callable[[], None]] = Future()  # its result lets the broker answer

    def hold(command: Command) -> Reply:
        if leaving.done():
            return Reply()
        answer, token = trio.Event(), trio.lowlevel.current_trio_token()
        leaving.set_result(lambda: token.run_sync_soon(answer.set))
        return Reply(hold=answer)

    def prepare(cluster: Cluster) -> None:
        cluster.broker.overrides[RequestCode.UNREGISTER_CLIENT] = hold

    async def main() -> None:
        sent = asyncio.Event()

        async def block() -> None:
            async with aio.Producer(ThreadCluster(prepare).settings(), "P", send_timeout_s=PATIENCE_S) as producer:
                await producer.send(Message("T", b"x"))
                sent.set()
                await asyncio.sleep(PATIENCE_S)

        task = asyncio.create_task(block())
        await sent.wait()
        task.cancel()
        answer = await asyncio.wrap_future(leaving)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        answer()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


# The same methods


@pytest.mark.parametrize("facade", [aio, blocking], ids=["asyncio", "blocking"])
@pytest.mark.parametrize("name", aio.__all__)
def test_a_facade_has_every_method_with_the_same_arguments(facade: Any, name: str) -> None:
    original, twin = getattr(client, name), getattr(facade, name)
    public = [member for member in vars(original) if not member.startswith("_")]
    assert [member for member in public if not hasattr(twin, member)] == []
    for member in public:
        function, same = getattr(original, member), getattr(twin, member)
        if inspect.isfunction(function):
            wanted = [str(p.replace(annotation=p.empty)) for p in inspect.signature(function).parameters.values()]
            found = inspect.signature(same).parameters.values()
            assert [str(p.replace(annotation=p.empty)) for p in found] == wanted, member
            waits = inspect.iscoroutinefunction(function) and facade is aio
            assert inspect.iscoroutinefunction(same) is waits, member


def test_type_checkers_see_the_signatures() -> None:
    """mypy checks this test; its calls fail, because the clients are not open."""
    producer = blocking.Producer(ThreadCluster().settings(), "P")
    with pytest.raises(ClientClosed):
        assert_type(producer.send(Message("T", b"x"), timeout_s=1), SendResult)
    with pytest.raises(ClientClosed):
        producer.send(b"x")  # type: ignore[arg-type]
    with pytest.raises(ClientClosed):
        producer.send(Message("T", b"x"), nonsense=1)  # type: ignore[call-arg]

    async def main() -> None:
        asynchronous = aio.Producer(ThreadCluster().settings(), "P")
        with pytest.raises(ClientClosed):
            assert_type(await asynchronous.send_batch([Message("T", b"x")]), SendResult)

    asyncio.run(main())
