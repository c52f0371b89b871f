"""Send and consume in an asyncio program.

python examples/client_asyncio.py 127.0.0.1:9876
"""

import asyncio
import sys

from martlet_client import ConsumeFrom, Message, ReceivedMessage
from martlet_client.aio import Producer, PushConsumer


async def main(name_server: str) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen(message: ReceivedMessage) -> None:
        await received.put(message.body)

    async with Producer(name_server, "asyncio-producers") as producer:
        await asyncio.gather(*(producer.send(Message("Greetings", f"hello {number}".encode())) for number in range(5)))

    async with PushConsumer(
        name_server, "asyncio-consumers", listen, {"Greetings": "*"}, consume_from=ConsumeFrom.FIRST
    ):
        for _ in range(5):
            print((await received.get()).decode())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"))
