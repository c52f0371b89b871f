"""Consume messages with trio, as one member of a group; start it twice and the members share the queues.

    python examples/client_consumer.py 127.0.0.1:9876

Ends after seven messages, which is what client_producer.py sends.
"""

import sys

import trio

from martlet_client import ConsumeFrom, Outcome, PushConsumer, ReceivedMessage

WANTED = 7


async def main(name_server: str) -> None:
    everything = trio.Event()
    count = 0

    async def listen(message: ReceivedMessage) -> Outcome:
        nonlocal count
        print(
            f"{message.tags}: {message.body.decode()} (queue {message.queue.queue_id}, try {message.reconsume_times})"
        )
        count += 1
        if count >= WANTED:
            everything.set()
        # RETRY, or to raise, would bring the message again later.
        return Outcome.SUCCESS

    async with PushConsumer(name_server, "example-consumers", listen, {"Orders": "*"}, consume_from=ConsumeFrom.FIRST):
        await everything.wait()


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
