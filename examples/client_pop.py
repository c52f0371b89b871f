"""Take messages one by one with a pop consumer, which need not keep up: start several, and they share the work.

    python examples/client_pop.py 127.0.0.1:9876

A message that is not acknowledged within its invisible time comes again, here or at another consumer.
"""

import sys

from martlet_client import Message
from martlet_client.blocking import Admin, PopConsumer, Producer

TOPIC = "Jobs"


def main(name_server: str) -> None:
    with Admin(name_server) as admin:
        admin.create_topic(TOPIC, queues=2)
    with Producer(name_server, "example-jobs") as producer:
        for job in ("resize", "print", "mail"):
            producer.send(Message(TOPIC, job.encode()))
    done = 0
    with PopConsumer(name_server, "example-workers") as consumer:
        while done < 3:
            for popped in consumer.receive(TOPIC, messages_max=1, invisible_s=30, wait_s=5):
                job, failures = popped.body.decode(), popped.message.reconsume_times
                if job == "print" and not failures:
                    print("print: the printer is busy, again in a second")
                    consumer.change_invisible(popped, 1)
                    continue
                consumer.ack(popped)
                done += 1
                print(f"{job}: done after {failures} failures")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
