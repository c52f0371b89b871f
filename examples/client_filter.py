"""Receive only the messages whose properties match an SQL92 expression; the broker evaluates it.

python examples/client_filter.py 127.0.0.1:9876
"""

import sys

import trio

from martlet_client import BrokerError, Message, Producer, PullConsumer, Sql

ORDERS = (("book", "18.50"), ("piano", "4200"), ("book", "7"), ("violin", "900"))
EXPENSIVE = Sql("price >= 15 AND kind IN ('book', 'piano')")


async def main(name_server: str) -> None:
    async with Producer(name_server, "filter-producers") as producer:
        for number, (kind, price) in enumerate(ORDERS):
            message = Message("Sales", f"sale {number}: a {kind}".encode(), properties={"kind": kind, "price": price})
            await producer.send(message)

    async with PullConsumer(name_server, "filter-readers") as consumer:
        for queue in await consumer.queues("Sales"):
            async for found in consumer.read(queue, 0, expression=EXPENSIVE, follow=False):
                print(found.body.decode())

        queue = (await consumer.queues("Sales"))[0]
        try:
            await consumer.pull(queue, 0, expression=Sql("price >="))
        except BrokerError as error:
            print(f"refused: {error}")


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
