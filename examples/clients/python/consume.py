"""Prints the bodies of COUNT messages: consume.py NAME_SERVER TOPIC COUNT."""

import sys
from threading import Semaphore

from martlet_client import ConsumeFrom, ReceivedMessage
from martlet_client.blocking import PushConsumer

name_server, topic, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
received = Semaphore(0)


def take(message: ReceivedMessage) -> None:
    # Called in several threads at once; one write keeps the line whole.
    sys.stdout.write(f"received: {message.body.decode()}\n")
    received.release()


with PushConsumer(name_server, "python-example", take, {topic: "*"}, consume_from=ConsumeFrom.FIRST):
    for _ in range(count):
        received.acquire()
