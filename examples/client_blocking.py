"""Send, read and ask in plain synchronous code.

python examples/client_blocking.py 127.0.0.1:9876
"""

import sys

from martlet_client import Message
from martlet_client.blocking import Admin, Producer, PullConsumer


def main(name_server: str) -> None:
    with Admin(name_server) as admin:
        admin.create_topic("Readings", queues=2)

    with Producer(name_server, "reading-producers") as producer:
        for celsius in (19, 21, 23):
            producer.send(Message("Readings", f"{celsius} C".encode(), keys="kitchen"))

    with PullConsumer(name_server, "reading-consumers") as consumer:
        for queue in consumer.queues("Readings"):
            for message in consumer.read(queue):
                print(f"queue {queue.queue_id} offset {message.queue_offset}: {message.body.decode()}")

    with Admin(name_server) as admin:
        for stats in admin.topic_stats("Readings"):
            print(f"queue {stats.queue.queue_id} holds {stats.max_offset - stats.min_offset} messages")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
