"""BEGIN, COMMIT and ABORT."""

from .place import Place, exchange, outcome, texts


@exchange("RECEIPT of a SEND in a transaction")
def receipt_in_a_transaction(place: Place) -> str:
    wire = place.wire()
    wire.do("BEGIN", transaction="t")
    wire.send("SEND", "1", destination=place.queue, transaction="t", receipt="in it")
    wire.send("BEGIN", transaction="other", receipt="after it")
    first = wire.read()
    wire.do("COMMIT", transaction="t")
    return "at once" if first.headers["receipt-id"] == "in it" else "at its end"


@exchange("COMMIT of 1 2, after 0 outside of it: the order")
def commit(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    wire.do("BEGIN", transaction="t")
    for body in "12":
        wire.send("SEND", body, destination=place.queue, transaction="t")
    wire.publish(place.queue, "0")
    wire.do("COMMIT", transaction="t")
    return texts(wire.messages(3))


@exchange("ABORT of SEND 1 2: what comes")
def abort(place: Place) -> str:
    wire = place.wire()
    wire.do("BEGIN", transaction="t")
    for body in "12":
        wire.send("SEND", body, destination=place.queue, transaction="t")
    wire.do("ABORT", transaction="t")
    return texts(place.rest())


@exchange("DISCONNECT with a transaction of SEND 1 2: what comes")
def forgotten_transaction(place: Place) -> str:
    wire = place.wire()
    wire.do("BEGIN", transaction="t")
    for body in "12":
        wire.send("SEND", body, destination=place.queue, transaction="t")
    wire.leave()
    return texts(place.rest())


@exchange("COMMIT of ACK 1 and SEND 2, then DISCONNECT: what comes")
def committed_ack(place: Place) -> str:
    return _acked_in_transaction(place, "COMMIT", "2")


@exchange("ABORT of ACK 1 and SEND 2, then DISCONNECT: what comes")
def aborted_ack(place: Place) -> str:
    return _acked_in_transaction(place, "ABORT", "1")


def _acked_in_transaction(place: Place, end: str, last: str) -> str:
    wire, messages = place.holder("1")
    wire.do("BEGIN", transaction="t")
    wire.send("ACK", id=messages[0].headers["ack"], transaction="t")
    wire.send("SEND", "2", destination=place.queue, transaction="t", persistent="true")
    wire.do(end, transaction="t")
    wire.leave()
    return texts(place.rest(last))


@exchange("ACK in a transaction, UNSUBSCRIBE, COMMIT")
def commit_after_unsubscribe(place: Place) -> str:
    wire, messages = place.holder("1")
    wire.do("BEGIN", transaction="t")
    wire.send("ACK", id=messages[0].headers["ack"], transaction="t")
    wire.do("UNSUBSCRIBE", id="0")
    return outcome(wire, "COMMIT", transaction="t")


@exchange("ACK after UNSUBSCRIBE, in a transaction")
def late_ack_in_a_transaction(place: Place) -> str:
    wire, messages = place.holder("1")
    wire.do("UNSUBSCRIBE", id="0")
    wire.do("BEGIN", transaction="t")
    wire.send("ACK", id=messages[0].headers["ack"], transaction="t")
    return outcome(wire, "COMMIT", transaction="t")
