"""Send three messages and receive them: python examples/client_first.py 127.0.0.1:9876"""

import sys
from threading import Semaphore

from martlet_client import ClientError, ConsumeFrom, Message, ReceivedMessage
from martlet_client.blocking import Producer, PushConsumer


def main(name_server: str) -> None:
    received = Semaphore(0)

    def show(message: ReceivedMessage) -> None:  # a message is done when this returns, and comes again if it raises
        print(message.body.decode())
        received.release()

    with Producer(name_server, "greeters") as producer:
        for number in range(3):
            producer.send(Message("FirstGreetings", f"hello {number}".encode()))

    topics, first = {"FirstGreetings": "*"}, ConsumeFrom.FIRST
    with PushConsumer(name_server, "readers", show, topics, consume_from=first, concurrency=1):
        for _ in range(3):
            received.acquire()


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
    except ClientError as error:  # the base of all that brokers, name servers and the network do
        sys.exit(str(error))
