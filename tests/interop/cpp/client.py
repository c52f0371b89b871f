"""A program over RocketMQ's C++ client; it runs in a process of its own, with `fetch.cpp_python`.

    client.py produce NAME_SERVER TOPIC COUNT     sends in every way the client has, prints a JSON line a message
    client.py consume NAME_SERVER GROUP TOPIC COUNT EXPRESSION [orderly|broadcasting|FAILURES]
                                                      prints a JSON line a delivery, ends after COUNT messages; the
                                                      first FAILURES deliveries of each fail (-1: all of them)
    client.py send NAME_SERVER orderly|sync MESSAGES  sends messages given as a JSON list, prints a JSON line a result

INTEROP_ACCESS_KEY and INTEROP_SECRET_KEY sign all requests of send.

The client is a C library behind ctypes that can take its process down: nothing here shares one with the tests.
"""

import base64
import json
import os
import sys
import threading
import zlib
from typing import Any

from rocketmq.client import Message, MessageModel, Producer, PushConsumer, RecvMessage  # type: ignore[import-not-found]


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def message(topic: str, how: str, number: int) -> Any:
    made = Message(topic)
    made.set_keys(f"{how}-{number}")
    made.set_tags(how)
    made.set_property("number", str(number))
    made.set_body(f"{how} {number}")
    return made


def produce(name_server: str, topic: str, count: str) -> None:
    producer = Producer(f"{topic}_producer", timeout=120_000, max_message_size=4 << 20)
    producer.set_namesrv_addr(name_server)
    producer.start()
    for number in range(int(count)):
        for how, send in (
            ("sync", producer.send_sync),
            ("orderly", lambda made: producer.send_orderly(made, number)),  # noqa: B023
        ):
            result = send(message(topic, how, number))
            say(how=how, status=result.status.name, msg_id=result.msg_id, offset=result.offset)
        producer.send_oneway(message(topic, "oneway", number))
        say(how="oneway")
    batch = producer.send_batch([message(topic, "batch", number) for number in range(int(count))])
    say(how="batch", status=batch.status.name, msg_id=batch.msg_id, offset=batch.offset)
    large = Message(topic)
    large.set_body("large " * 100_000)
    say(how="large", status=producer.send_sync(large).status.name)
    producer.shutdown()


def given(said: dict[str, Any]) -> Any:
    """Return the message that a test describes."""
    made = Message(said["topic"])
    made.set_body(base64.b64decode(said["body"]))
    if "tags" in said:
        made.set_tags(said["tags"])
    if "keys" in said:
        made.set_keys(said["keys"])
    if "delay_level" in said:
        made.set_delay_time_level(said["delay_level"])
    for key, value in said.get("properties", {}).items():
        made.set_property(key, value)
    return made


def send(name_server: str, how: str, messages: str) -> None:
    producer = Producer("cpp_sender", timeout=120_000)
    producer.set_namesrv_addr(name_server)
    if "INTEROP_ACCESS_KEY" in os.environ:
        producer.set_session_credentials(os.environ["INTEROP_ACCESS_KEY"], os.environ["INTEROP_SECRET_KEY"], "")
    producer.start()
    for said in json.loads(messages):
        if how == "orderly":
            result = producer.send_orderly(given(said), zlib.crc32(said["sharding_key"].encode()) & 0x7FFFFFFF)
        else:
            result = producer.send_sync(given(said))
        say(status=result.status.name, msg_id=result.msg_id, offset=result.offset)
    producer.shutdown()


def failing(deliver: Any, failures: int) -> Any:
    """A callback that fails at first; the wheel's own counts a message as consumed even if its callback raises."""

    def on_message(_: Any, raw: Any) -> int:
        received = RecvMessage(raw)
        if failures < 0 or received.reconsume_times < failures:
            say(event="failure", reconsume_times=received.reconsume_times)
            return 1  # RECONSUME_LATER
        deliver(received)
        return 0

    return on_message


def consume(name_server: str, group: str, topic: str, count: str, expression: str, how: str = "") -> None:
    model = MessageModel.BROADCASTING if how == "broadcasting" else MessageModel.CLUSTERING
    consumer = PushConsumer(group, orderly=how == "orderly", message_model=model)
    consumer.set_namesrv_addr(name_server)
    seen: set[tuple[int, int]] = set()
    done = threading.Event()
    turn = threading.Lock()

    def deliver(received: Any) -> None:
        with turn:
            say(
                topic=received.topic,
                queue=received.queue_id,
                offset=received.queue_offset,
                tags=text(received.tags),
                keys=text(received.keys),
                number=text(received.get_property("number")),
                body_bytes=len(received.body),
                body=text(received.body)[:40],
                reconsume_times=received.reconsume_times,
                born_ms=received.born_timestamp,
                stored_ms=received.store_timestamp,
            )
            seen.add((received.queue_id, received.queue_offset))
            if len(seen) == int(count):
                done.set()

    consumer.subscribe(topic, deliver, expression)
    if how.removeprefix("-").isdecimal():
        consumer._register_callback(failing(deliver, int(how)))
    consumer.start()
    say(event="started")
    done.wait()
    consumer.shutdown()


if sys.argv[1] == "produce":
    produce(*sys.argv[2:])
elif sys.argv[1] == "send":
    send(*sys.argv[2:])
else:
    consume(*sys.argv[2:])
sys.stdout.flush()
os._exit(0)  # the library's own threads do not always end
