"""Sends COUNT messages: produce.py NAME_SERVER TOPIC COUNT."""

import sys

from martlet_client import Message
from martlet_client.blocking import Producer

name_server, topic, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Producer(name_server, "python-example") as producer:
    for number in range(count):
        result = producer.send(Message(topic, f"message {number}".encode(), tags="example"))
        print("sent:", result.queue.queue_id, result.queue_offset)
