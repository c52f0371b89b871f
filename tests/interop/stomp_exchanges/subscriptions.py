"""Durable subscriptions, selectors, browsers and messages that expire or come later."""

import select
import time

from tests.interop.process import eventually
from tests.interop.stomp_wire import Wire

from .place import END, Place, ended, exchange, outcome, texts


@exchange("durable subscription by `client-id` and `activemq.subscriptionName`: 1 sent while it was away")
def durable_of_activemq(place: Place) -> str:
    return _kept(place, {"client_id": place.name}, {"activemq.subscriptionName": "s"})


@exchange("durable subscription by `durable:true`, `auto-delete:false` and `id`: 1 sent while it was away")
def durable_of_rabbitmq(place: Place) -> str:
    return _kept(place, {"client_id": place.name}, {"durable": "true", "auto_delete": "false"})


def _kept(place: Place, connect: dict[str, str], subscribe: dict[str, str]) -> str:
    wire = place.wire(**connect)
    wire.subscribe(place.topic, number=place.name, **subscribe)
    wire.leave()
    other = place.wire()
    other.publish(place.topic, "1")
    wire = eventually(lambda: _connected(place, connect))
    wire.subscribe(place.topic, number=place.name, **subscribe)
    other.publish(place.topic, END)
    return "kept" if wire.until(END) else "lost"


def _connected(place: Place, connect: dict[str, str]) -> Wire | None:
    """Return a connection, None while the client's last one is not forgotten yet."""
    wire = place.wire(**connect)
    return wire if wire.connected.command == "CONNECTED" else None


@exchange("`selector:colour = 'red'`: what comes of one red and one blue message")
def selector(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue, selector="colour = 'red'")
    for colour in ("blue", "red"):
        wire.publish(place.queue, colour, colour=colour)
    wire.publish(place.queue, END, colour="red")
    return " ".join(wire.until(END))


@exchange("`selector:JMSPriority > 4`: what comes of priority 1, 9 and none")
def priority_selector(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue, selector="JMSPriority > 4")
    for priority in ({"priority": "1"}, {"priority": "9"}, {}):
        wire.publish(place.queue, priority.get("priority", "none"), **priority)
    wire.publish(place.queue, END, priority="9")
    return " ".join(wire.until(END))


@exchange("`selector:JMSPriority = 4 AND JMSExpiration = 0 AND JMSTimestamp > 0`: a message without headers comes")
def selector_without_headers(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue, selector="JMSPriority = 4 AND JMSExpiration = 0 AND JMSTimestamp > 0")
    wire.publish(place.queue, "x")
    return "yes" if wire.message().text == "x" else "no"


@exchange("`selector:JMSDeliveryMode = 'PERSISTENT'`: what comes of `persistent:true` and of none")
def delivery_mode_selector(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue, selector="JMSDeliveryMode = 'PERSISTENT'")
    wire.do("SEND", "none", destination=place.queue)
    wire.do("SEND", "persistent", destination=place.queue, persistent="true")
    wire.publish(place.queue, END)
    return " ".join(wire.until(END))


@exchange("SUBSCRIBE with `x-max-length:5`")
def longest_queue(place: Place) -> str:
    return outcome(place.wire(), "SUBSCRIBE", id="0", destination=place.queue, **{"x-max-length": "5"})


@exchange("SUBSCRIBE with `activemq.priority:10`")
def priority_of_a_consumer(place: Place) -> str:
    return outcome(place.wire(), "SUBSCRIBE", id="0", destination=place.queue, **{"activemq.priority": "10"})


@exchange("SUBSCRIBE with `activemq.typo:1`")
def unknown_argument(place: Place) -> str:
    return outcome(place.wire(), "SUBSCRIBE", id="0", destination=place.queue, **{"activemq.typo": "1"})


@exchange("STOMP 1.0: a second SUBSCRIBE without `id` to the same topic: how often a message comes")
def second_subscription_without_id(place: Place) -> str:
    wire = place.wire(accept_version="1.0")
    answers = [wire.ask("SUBSCRIBE", destination=place.topic).command for _ in range(2)]
    if "ERROR" in answers:
        return "ERROR"
    wire.publish(place.topic, "x")
    wire.publish(place.topic, END)
    found = [wire.message().text for _ in range(2)]
    return str(found.count("x"))


@exchange("`browser:true`: what remains of 1 2")
def browser(place: Place) -> str:
    wire = place.wire()
    wire.publish(place.queue, "1", "2")
    wire.subscribe(place.queue, browser="true")
    wire.messages(2)
    wire.leave()
    return texts(place.rest())


@exchange("a browser gets `browser:end` after the last message")
def end_of_browsing(place: Place) -> str:
    wire = place.wire()
    wire.publish(place.queue, "1")
    wire.subscribe(place.queue, browser="true")
    wire.messages(1)
    wire.publish(place.queue, "2")  # the answer of a broker without browsers
    return "yes" if wire.message().headers.get("browser") == "end" else "no"


@exchange("`expires` in the past: the message comes")
def expires(place: Place) -> str:
    wire = place.wire()
    wire.publish(place.queue, "1", expires=str(int(time.time() * 1000) - 1000))
    return "no" if texts(place.rest()) == "nothing" else "yes"


@exchange("`expiration:1` and 100 ms later: the message comes")
def expiration(place: Place) -> str:
    wire = place.wire()
    wire.publish(place.queue, "1", expiration="1")
    sent = time.monotonic()
    eventually(lambda: time.monotonic() - sent > 0.1 or None)
    return "no" if texts(place.rest()) == "nothing" else "yes"


@exchange("`AMQ_SCHEDULED_DELAY:1000` of 1, then 2: the order")
def scheduled(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.send("SEND", "1", destination=place.queue, AMQ_SCHEDULED_DELAY="1000")
    wire.send("SEND", "2", destination=place.queue)
    return texts(wire.messages(2))


@exchange("`AMQ_SCHEDULED_PERIOD:500` with `AMQ_SCHEDULED_REPEAT:2`: how often the message comes")
def repeated(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.send("SEND", "1", destination=place.queue, AMQ_SCHEDULED_PERIOD="500", AMQ_SCHEDULED_REPEAT="2")
    wire.send("SEND", END, destination=place.queue, AMQ_SCHEDULED_DELAY="5000")
    return str(len(wire.until(END)))


@exchange("`AMQ_SCHEDULED_CRON:* * * * *` of 1, then 2: the order")
def cron(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.send("SEND", "1", destination=place.queue, AMQ_SCHEDULED_CRON="* * * * *")
    wire.send("SEND", "2", destination=place.queue)
    return texts(wire.messages(2))


@exchange(
    "`AMQ_SCHEDULED_REPEAT:999`, then `AMQ_SCHEDULER_ACTION:REMOVE` with `scheduledJobId`: the message comes again"
)
def removed(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.send("SEND", "1", destination=place.queue, AMQ_SCHEDULED_PERIOD="500", AMQ_SCHEDULED_REPEAT="999")
    job = wire.message().headers.get("scheduledJobId")
    if job is None:
        return "it has no id"
    wire.publish("/topic/ActiveMQ.Scheduler.Management", "", AMQ_SCHEDULER_ACTION="REMOVE", scheduledJobId=job)
    wire.publish(place.queue, "removed")
    wire.until("removed")
    wire.send("SEND", END, destination=place.queue, AMQ_SCHEDULED_DELAY="2000")
    return "yes" if wire.until(END) else "no"


@exchange("SEND with `AMQ_SCHEDULED_REPEAT:-1` and a period")
def repeated_for_ever(place: Place) -> str:
    repeats = {"AMQ_SCHEDULED_PERIOD": "60000", "AMQ_SCHEDULED_REPEAT": "-1"}
    return outcome(place.wire(), "SEND", "1", destination=place.queue, **repeats)


@exchange("SEND with `AMQ_SCHEDULED_CRON:* * * * 7`")
def wrong_cron(place: Place) -> str:
    return outcome(place.wire(), "SEND", "1", destination=place.queue, AMQ_SCHEDULED_CRON="* * * * 7")


@exchange("`activemq.noLocal:true` with a topic: what the connection sent itself comes")
def no_local_of_activemq(place: Place) -> str:
    return _own_messages(place, **{"activemq.noLocal": "true"})


@exchange("`no-local:true` with a topic: what the connection sent itself comes")
def no_local(place: Place) -> str:
    return _own_messages(place, no_local="true")


def _own_messages(place: Place, **headers: str) -> str:
    wire = place.wire()
    wire.subscribe(place.topic, **headers)
    wire.publish(place.topic, "own")
    place.wire().publish(place.topic, END)
    return "yes" if wire.until(END) else "no"


@exchange("request with a `reply-to` of `/temp-queue/NAME`, to which its client subscribed: the reply")
def reply_to_a_temporary_queue(place: Place) -> str:
    client, service = place.wire(), place.wire()
    service.subscribe(place.queue)
    answer = client.ask("SUBSCRIBE", id="replies", destination="/temp-queue/replies")
    if answer.command == "ERROR":
        return ended(client, lambda: answer)
    client.publish(place.queue, "what?", reply_to="/temp-queue/replies")
    service.publish(service.message().headers["reply-to"], "this")
    return "comes" if client.message().text == "this" else "is lost"


@exchange("`/queue/Consumer.A.VirtualTopic.NAME` of what is sent to `/topic/VirtualTopic.NAME`: which of 1 2 come")
def virtual_topic(place: Place) -> str:
    topic, wire, sender = f"/topic/VirtualTopic.{place.name}", place.wire(), place.wire()
    queue = f"/queue/Consumer.A.VirtualTopic.{place.name}"
    wire.subscribe(queue)
    sender.publish(topic, "1", "2")
    if sender.ask("SEND", END, destination=queue).command == "ERROR":
        place.wire().publish(topic, END)
    return " ".join(wire.until(END)) or "nothing"


@exchange("`/queue/Consumer.A.VirtualTopic.NAME`: `destination` of its messages")
def destination_of_virtual_topic(place: Place) -> str:
    wire, queue = place.wire(), f"/queue/Consumer.A.VirtualTopic.{place.name}"
    wire.subscribe(queue)
    place.wire().publish(f"/topic/VirtualTopic.{place.name}", "1")
    place.wire().send("SEND", END, destination=queue)
    return "that queue" if wire.message().headers["destination"] == queue else "another"


@exchange("SEND to `/queue/Consumer.A.VirtualTopic.NAME`")
def send_to_a_virtual_topics_queue(place: Place) -> str:
    return outcome(place.wire(), "SEND", "x", destination=f"/queue/Consumer.A.VirtualTopic.{place.name}")


@exchange("`JMSXGroupID:a` of 1 2 3 4 with two consumers: how many of them get some")
def message_group(place: Place) -> str:
    wires = [place.wire(), place.wire()]
    for wire in wires:
        wire.subscribe(place.queue)
    place.wire().publish(place.queue, *"1234", JMSXGroupID="a")
    getting: set[Wire] = set()
    left = 4
    while left:
        for wire in wires:
            while wire.has_message():
                wire.message()
                getting.add(wire)
                left -= 1
        ready = select.select([wire.socket for wire in wires], [], [], 0.1)[0] if left else []
        for wire in wires:
            if wire.socket in ready:
                wire.receive()
    return str(len(getting))
