"""Deliver a message only if local work succeeds: python client_transactions.py 127.0.0.1:9876."""

import sys

import trio

from martlet_client import (
    ConsumeFrom,
    Message,
    PushConsumer,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
)

TOPIC = "Payments"
paid: set[str] = set()  # stands for a table of a database


def pay(message: Message, transaction_id: str) -> TransactionState:
    """Do the work; the message is delivered only if this returns COMMIT."""
    if message.properties["account"] == "empty":
        return TransactionState.ROLLBACK
    paid.add(transaction_id)
    return TransactionState.COMMIT


def check(message: ReceivedMessage) -> TransactionState:
    """The broker asks, because it did not hear what became of the work: look it up."""
    return TransactionState.COMMIT if message.message_id in paid else TransactionState.ROLLBACK


async def main(name_server: str) -> None:
    received = trio.Event()

    def listener(message: ReceivedMessage) -> None:
        print(f"received {message.body.decode()}")
        trio.from_thread.run_sync(received.set)

    async with TransactionProducer(name_server, "payers", check) as producer:
        for account in "empty", "full":
            message = Message(TOPIC, f"payment from {account}".encode(), properties={"account": account})
            result = await producer.send_in_transaction(message, pay, timeout_s=60)
            print(f"{account}: {result.state.name.lower()}")
    async with PushConsumer(name_server, "bookkeeping", listener, {TOPIC: "*"}, consume_from=ConsumeFrom.FIRST):
        await received.wait()


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876")
