"""Send messages with trio: one by one, to a chosen queue, and as a batch.

python examples/client_producer.py 127.0.0.1:9876
"""

import sys

import trio

from martlet_client import Message, Producer, select_by_hash


async def main(name_server: str) -> None:
    async with Producer(name_server, "example-producers") as producer:
        result = await producer.send(Message("Orders", b"order 1 created", tags="created", keys="order-1"))
        print(f"stored as {result.message_id} in queue {result.queue.queue_id} at offset {result.queue_offset}")

        # All messages of one order go to one queue, so that they are consumed in order.
        for step in ("paid", "packed", "shipped"):
            message = Message("Orders", f"order 1 {step}".encode(), tags=step, keys="order-1")
            await producer.send(message, selector=select_by_hash, argument="order-1")

        batch = [Message("Orders", f"order {number} created".encode(), tags="created") for number in (2, 3, 4)]
        result = await producer.send_batch(batch)
        print(f"stored {len(batch)} messages in queue {result.queue.queue_id}")


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
