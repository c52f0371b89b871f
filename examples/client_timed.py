"""Send messages that arrive later, and recall one of them: python client_timed.py 127.0.0.1:9876."""

import sys
import time

import trio

from martlet_client import ConsumeFrom, Message, Producer, PushConsumer, ReceivedMessage

TOPIC = "Reminders"
DAY_MS = 86_400_000


async def main(name_server: str) -> None:
    received = trio.Event()

    async def listener(message: ReceivedMessage) -> None:
        # `main` waits for each message in turn.
        print(f"received {message.body.decode()}")
        received.set()

    async with (
        Producer(name_server, "reminders") as producer,
        PushConsumer(name_server, "reminded", listener, {TOPIC: "*"}, consume_from=ConsumeFrom.FIRST),
    ):
        tomorrow_ms = int(time.time() * 1000) + DAY_MS
        sent = await producer.send(Message(TOPIC, b"coffee", deliver_at_ms=tomorrow_ms))
        await producer.recall(TOPIC, sent.recall_handle)
        print("recalled coffee")
        await producer.send(Message(TOPIC, b"tea", delay_ms=300))
        await received.wait()
        received = trio.Event()
        await producer.send(Message(TOPIC, b"biscuits", delay_level=1))  # the first of the broker's levels: 1 s
        await received.wait()


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
