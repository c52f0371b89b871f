"""Ask a question over a topic and get the answer: python client_request_reply.py 127.0.0.1:9876."""

import sys

import trio

from martlet_client import ConsumeFrom, Message, NoReply, Producer, PushConsumer, ReceivedMessage

TOPIC = "Prices"
PRICES = {b"apple": b"0.45", b"pear": b"0.60"}


async def main(name_server: str) -> None:
    async with Producer(name_server, "prices-answers") as answering:

        async def listener(question: ReceivedMessage) -> None:
            await answering.reply(question, PRICES.get(question.body, b"unknown"))

        async with (
            Producer(name_server, "prices-questions") as asking,
            PushConsumer(name_server, "prices", listener, {TOPIC: "*"}, consume_from=ConsumeFrom.FIRST),
        ):
            for fruit in ("apple", "pear", "plum"):
                try:
                    reply = await asking.request(Message(TOPIC, fruit.encode()), timeout_s=60)
                except NoReply as error:
                    print(error)
                else:
                    print(f"{fruit}: {reply.body.decode()}")


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
