"""Headers, bodies and destinations."""

from .place import END, Place, exchange, outcome, texts


@exchange("header with `\\n`, `\\c`, `\\\\`")
def escapes(place: Place) -> str:
    value = "a:b\nc\\d"
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.publish(place.queue, "x", odd=value)
    return "kept" if wire.message().headers["odd"] == value else "changed"


@exchange("repeated header: which one counts")
def repeated_header(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.socket.sendall(f"SEND\ndestination:{place.queue}\nn:first\nn:second\n\nx\0".encode())
    return wire.message().headers["n"]


@exchange("body with NUL and `content-length`")
def nul_bodies(place: Place) -> str:
    body = bytes(range(256)) * 2
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.do("SEND", body, destination=place.queue, content_length=str(len(body)))
    return "kept" if wire.message().body == body else "changed"


@exchange("empty body")
def empty_body(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.publish(place.queue, "")
    return "kept" if wire.message().body == b"" else "changed"


@exchange("MESSAGE has a `content-length`")
def content_length(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.publish(place.queue, "x", content_type="text/plain")
    return "yes" if wire.message().headers.get("content-length") == "1" else "no"


@exchange("MESSAGE has a `timestamp`")
def timestamp(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.publish(place.queue, "x")
    return "yes" if int(wire.message().headers.get("timestamp", "0")) > 1_000_000_000_000 else "no"


@exchange("`timestamp:1700000000` of SEND in MESSAGE")
def own_timestamp(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.publish(place.queue, "x", timestamp="1700000000")
    return "kept" if wire.message().headers.get("timestamp") == "1700000000" else "changed"


@exchange("body of 300,000 bytes")
def large_body(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    body = "0123456789" * 30_000
    wire.publish(place.queue, body)
    return "kept" if wire.message().text == body else "changed"


@exchange("headers `content-type`, `correlation-id`, `reply-to`, `priority` and own ones")
def passed_headers(place: Place) -> str:
    headers = {"content_type": "text/plain", "correlation_id": "7", "reply_to": place.topic, "priority": "7"}
    headers["colour"] = "dark blue"
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.publish(place.queue, "x", **headers)
    got = wire.message().headers
    lost = [name for name, value in headers.items() if got.get(name.replace("_", "-")) != value]
    return "kept" if not lost else f"changed: {' '.join(lost)}"


@exchange("headers `receipt` and `transaction` of SEND in MESSAGE")
def control_headers(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.do("BEGIN", transaction="t")
    wire.send("SEND", "x", destination=place.queue, transaction="t", receipt="r")
    wire.send("COMMIT", transaction="t")
    wire.answer("r")
    got = wire.message().headers
    return " ".join(name for name in ("receipt", "transaction") if name in got) or "absent"


@exchange("SEND to `NAME` is to `/queue/NAME`")
def plain_name(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.publish(place.name, "x")
    return "yes" if wire.message().text == "x" else "no"


@exchange("SEND to `/queue/a/b`")
def slash_in_a_name(place: Place) -> str:
    wire = place.wire()
    return outcome(wire, "SEND", "x", destination=f"{place.queue}/b")


@exchange("SEND to `/elsewhere/NAME`")
def unknown_prefix(place: Place) -> str:
    wire = place.wire()
    return outcome(wire, "SEND", "x", destination=f"/elsewhere/{place.name}")


@exchange("SEND to `/topic/NAME.*`")
def send_to_a_wildcard(place: Place) -> str:
    return outcome(place.wire(), "SEND", "x", destination=f"{place.topic}.*")


@exchange("durable subscription to `/topic/NAME.*` by `durable:true` and `auto-delete:false`")
def durable_wildcard(place: Place) -> str:
    headers = {"durable": "true", "auto_delete": "false"}
    return outcome(place.wire(), "SUBSCRIBE", id=place.name, destination=f"{place.topic}.*", **headers)


@exchange("SUBSCRIBE to `/topic/NAME.*`: which of other.a, NAME.a.b and NAME.a come")
def level_wildcard(place: Place) -> str:
    wire, sender = place.wire(), place.wire()
    wire.subscribe(f"{place.topic}.*")
    sender.publish(f"/topic/other-{place.name}.a", "other.a")
    for name in ("a.b", "a"):
        sender.publish(f"{place.topic}.{name}", f"NAME.{name}")
    sender.publish(f"{place.topic}.a", END)
    return " ".join(wire.until(END))


@exchange("SUBSCRIBE to `/exchange/amq.topic/NAME`, SEND to `/topic/NAME`: `destination` of what comes")
def topic_exchange(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(f"/exchange/amq.topic/{place.name}")
    wire.publish(place.topic, "x")
    wire.publish(f"/exchange/amq.topic/{place.name}", END)
    message = wire.message()
    shown = message.headers["destination"].replace(place.name, "NAME")
    return shown if message.text == "x" else "nothing"


@exchange("SEND to `/exchange/NAME/key`, which nobody declared")
def unknown_exchange(place: Place) -> str:
    return outcome(place.wire(), "SEND", "x", destination=f"/exchange/{place.name}/key")


@exchange("SUBSCRIBE to `/amq/queue/NAME`, which is not there")
def unknown_amq_queue(place: Place) -> str:
    return outcome(place.wire(), "SUBSCRIBE", id="0", destination=f"/amq/queue/{place.name}")


@exchange("SEND to `/queue/NAME-a,/queue/NAME-b`: which queues have the message")
def list_of_destinations(place: Place) -> str:
    queues = f"{place.queue}-a", f"{place.queue}-b"
    answer = place.wire().ask("SEND", "x", destination=",".join(queues), persistent="true")
    if answer.command == "ERROR":
        return "ERROR"
    found = [queue.removeprefix(place.queue)[1:] for queue in queues if texts(place.rest(queue=queue)) == "x"]
    return " ".join(found) or "none"


@exchange("SUBSCRIBE to `/queue/NAME-a,/queue/NAME-b`: what comes of 1 to the first and 2 to the second")
def subscription_to_a_list(place: Place) -> str:
    queues = f"{place.queue}-a", f"{place.queue}-b"
    wire, sender = place.wire(), place.wire()
    if wire.ask("SUBSCRIBE", id="0", destination=",".join(queues)).command == "ERROR":
        return "ERROR"
    for queue, body in zip(queues, "12", strict=True):
        sender.publish(queue, body)
    return " ".join(sorted(message.text for message in wire.messages(2)))


@exchange("a topic's subscriptions also get what is sent to the queue of its name")
def queue_and_topic(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.topic)
    wire.publish(place.queue, "to the queue")
    wire.publish(place.topic, END)
    return "yes" if wire.until(END) else "no"


@exchange("two subscriptions of a topic: how many get a message")
def topic_fans_out(place: Place) -> str:
    wires = [place.wire(), place.wire()]
    for wire in wires:
        wire.subscribe(place.topic)
    wires[0].publish(place.topic, "x")
    return str(len([wire.message() for wire in wires]))
