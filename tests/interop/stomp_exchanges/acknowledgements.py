"""ACK, NACK, redelivery and prefetch."""

from tests.interop.stomp_wire import next_message

from .place import DEAD, END, Place, exchange, outcome, texts


@exchange("`ack:auto`: 1 2 3 came, then DISCONNECT: what comes again")
def auto(place: Place) -> str:
    wire, _ = place.holder("1", "2", "3", ack="auto")
    wire.leave()
    return texts(place.rest())


@exchange("`ack:client`: ACK of 3 of 1 2 3 4, then DISCONNECT: what comes again")
def cumulative(place: Place) -> str:
    wire, messages = place.holder("1", "2", "3", "4", ack="client")
    wire.settle("ACK", messages[2])
    wire.leave()
    return texts(place.rest("4"))


@exchange("`ack:client-individual`: ACK of 2 of 1 2 3, then DISCONNECT: what comes again")
def individual(place: Place) -> str:
    wire, messages = place.holder("1", "2", "3")
    wire.settle("ACK", messages[1])
    wire.leave()
    return texts(place.rest("3"))


@exchange("STOMP 1.1: ACK of 1 of 1 2 by `message-id` and `subscription`, then DISCONNECT: what comes again")
def ack_of_1_1(place: Place) -> str:
    return _acked_by_id(place, "1.1", subscription="0")


@exchange("STOMP 1.0: ACK of 1 of 1 2 by `message-id`, then DISCONNECT: what comes again")
def ack_of_1_0(place: Place) -> str:
    return _acked_by_id(place, "1.0")


def _acked_by_id(place: Place, version: str, **headers: str) -> str:
    wire = place.wire(accept_version=version)
    wire.subscribe(place.queue, "client")
    wire.publish(place.queue, "1", "2")
    wire.do("ACK", message_id=wire.messages(2)[0].headers["message-id"], **headers)
    wire.leave()
    return texts(place.rest("2"))


@exchange("1 2 3 came, then the connection breaks: what comes again, with `redelivered:true`")
def broken_connection(place: Place) -> str:
    wire, _ = place.holder("1", "2", "3")
    wire.close()
    messages = place.rest("3")
    marked = {message.headers.get("redelivered") == "true" for message in messages}
    return f"{texts(messages)}, {'marked' if marked == {True} else 'not marked'}"


@exchange("UNSUBSCRIBE with 1 unacknowledged: when it comes again")
def unsubscribe(place: Place) -> str:
    wire, _ = place.holder("1")
    wire.do("UNSUBSCRIBE", id="0")
    other = place.wire()
    other.subscribe(place.queue)
    other.publish(place.queue, END)
    if "1" in other.until(END):
        return "at once"
    wire.leave()
    assert other.message().text == "1"
    return "after DISCONNECT"


@exchange("NACK of a persistent message")
def nack(place: Place) -> str:
    wire, messages = place.holder(f"of {place.name}")
    for number, queue in enumerate(DEAD, 1):
        wire.subscribe(queue, "client-individual", str(number))
    wire.settle("NACK", messages[0])
    while (again := wire.message()).text != messages[0].text:
        pass  # dead letters of another exchange
    if again.headers["subscription"] == "0":
        return f"comes again, `redelivered:{again.headers.get('redelivered')}`"
    return f"moved to {DEAD[int(again.headers['subscription']) - 1]}"


@exchange("NACK with `requeue:false`")
def nack_without_requeue(place: Place) -> str:
    wire, messages = place.holder(f"of {place.name}")
    wire.settle("NACK", messages[0], requeue="false")
    wire.leave()
    for queue in DEAD:
        if messages[0].text in [message.text for message in place.rest(queue=queue)]:
            return f"moved to {queue}"
    return "dropped" if texts(place.rest()) == "nothing" else "comes again"


@exchange("prefetch of 2 by `activemq.prefetchSize`: how many of 5 a client holds")
def prefetch_of_activemq(place: Place) -> str:
    return _held(place, **{"activemq.prefetchSize": "2"})


@exchange("prefetch of 2 by `prefetch-count`: how many of 5 a client holds")
def prefetch_of_rabbitmq(place: Place) -> str:
    return _held(place, prefetch_count="2")


def _held(place: Place, **headers: str) -> str:
    """Return how many of 5 messages a client gets before another one comes, which gets the rest."""
    first, second = place.wire(), place.wire()
    first.subscribe(place.queue, "client-individual", **headers)
    first.publish(place.queue, *"12345")
    held = len(first.messages(2))
    second.subscribe(place.queue, "client-individual")
    second.publish(place.queue, END)
    for _ in range(4):
        wire, message = next_message(first, second)
        held += wire is first and message.text != END
    return str(held)


@exchange("ACK after UNSUBSCRIBE, with `receipt`")
def late_ack(place: Place) -> str:
    wire, messages = place.holder("1")
    wire.do("UNSUBSCRIBE", id="0")
    return outcome(wire, "ACK", id=messages[0].headers["ack"])


@exchange("ACK after UNSUBSCRIBE, without `receipt`")
def late_ack_without_receipt(place: Place) -> str:
    wire, messages = place.holder("1")
    wire.do("UNSUBSCRIBE", id="0")
    wire.send("ACK", id=messages[0].headers["ack"])
    return outcome(wire, "SEND", "still there", destination="/queue/probe")


@exchange("NACK of a dead letter: it is in the queue of dead letters")
def nack_of_a_dead_letter(place: Place) -> str:
    wire, [message] = place.holder(f"of {place.name}")
    wire.settle("NACK", message, requeue="false")
    wire.leave()
    for queue in DEAD:
        letters = place.wire()
        letters.subscribe(queue, "client-individual")
        letters.publish(queue, END)
        while (letter := letters.message()).text not in (message.text, END):
            pass
        if letter.text == message.text:
            letters.settle("NACK", letter)
            letters.leave()
            return "stays" if message.text in place.browse(queue) else "gone"
        letters.settle("ACK", letter)
        letters.leave()
    return "none"
