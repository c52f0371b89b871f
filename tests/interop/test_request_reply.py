"""Requests and replies, between Java clients and the Python client in every combination."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from tests.client.listening import PATIENCE_S

from martlet_client import ConsumeFrom, Message, NoReply, Producer, PushConsumer, ReceivedMessage

from .conftest import Target
from .java import Failed, Java, message
from .test_python_client import fill, patient

Name = Callable[[str], str]
BODY = "what? " + "é" * 3000  # long enough to be compressed, as is its reply


@asynccontextmanager
async def python_replier(target: Target, topic: str, group: str) -> AsyncIterator[None]:
    """Reply to every message of *topic*."""
    async with Producer(patient(target), f"{group}_replier", send_timeout_s=PATIENCE_S) as producer:

        async def reply(received: ReceivedMessage) -> None:
            await producer.reply(received, b"re: " + received.body, properties={"colour": "red"})

        async with PushConsumer(patient(target), group, reply, {topic: "*"}, consume_from=ConsumeFrom.FIRST):
            yield


async def test_python_answers_python(target: Target, name: Name) -> None:
    topic = name("ask")
    await fill(target, topic, 0)
    async with (
        python_replier(target, topic, name("group")),
        Producer(patient(target), name("asking"), send_timeout_s=PATIENCE_S) as producer,
    ):
        replies = [await producer.request(Message(topic, f"{i}{BODY}".encode())) for i in range(5)]
    assert [reply.body.decode() for reply in replies] == [f"re: {i}{BODY}" for i in range(5)]
    assert {reply.properties["colour"] for reply in replies} == {"red"}


async def test_python_answers_java(java: Java, target: Target, name: Name) -> None:
    topic = name("ask")
    await fill(target, topic, 0)
    asking = await trio.to_thread.run_sync(java.producer, name("asking"))
    async with python_replier(target, topic, name("group")):
        for i in range(3):
            body, properties = await trio.to_thread.run_sync(asking.request, message(topic, f"{i}{BODY}"))
            assert (body.decode(), properties["colour"]) == (f"re: {i}{BODY}", "red")


async def test_java_answers_python(java: Java, target: Target, name: Name) -> None:
    topic = name("ask")
    await fill(target, topic, 0)
    await trio.to_thread.run_sync(lambda: java.push(name("group"), topic, replying=True))
    async with Producer(patient(target), name("asking"), send_timeout_s=PATIENCE_S) as producer:
        replies = [await producer.request(Message(topic, f"{i}{BODY}".encode())) for i in range(3)]
    assert [reply.body.decode() for reply in replies] == [f"re: {i}{BODY}" for i in range(3)]


def test_java_answers_java(java: Java, name: Name) -> None:
    topic = name("ask")
    java.push(name("group"), topic, replying=True)
    asking = java.producer(name("asking"))
    for i in range(3):
        assert asking.request(message(topic, f"{i}{BODY}"))[0].decode() == f"re: {i}{BODY}"


async def test_without_a_replier_both_say_so(newest: Java, target: Target, name: Name) -> None:
    topic = name("ask")
    await fill(target, topic, 0)
    async with Producer(patient(target), name("asking"), send_timeout_s=PATIENCE_S) as producer:
        await producer.send(Message(topic, b"the route is known and the connection open"))
        with pytest.raises(NoReply):
            await producer.request(Message(topic, b"?"), timeout_s=3)
    asking = await trio.to_thread.run_sync(newest.producer, name("asking"))
    with pytest.raises(Failed, match="wait reply message timeout"):
        await trio.to_thread.run_sync(lambda: asking.request(message(topic, "?"), 3000))
