"""What is answered to frames that cannot be right."""

from .place import Place, ended, exchange, outcome


@exchange("COMMIT of an unknown transaction")
def unknown_transaction(place: Place) -> str:
    wire = place.wire()
    return outcome(wire, "COMMIT", transaction="nothing")


@exchange("SEND in an unknown transaction")
def send_in_an_unknown_transaction(place: Place) -> str:
    wire = place.wire()
    return outcome(wire, "SEND", destination=place.queue, transaction="nothing")


@exchange("BEGIN of a transaction that began")
def second_begin(place: Place) -> str:
    wire = place.wire()
    wire.do("BEGIN", transaction="t")
    return outcome(wire, "BEGIN", transaction="t")


@exchange("ACK of an unknown message")
def unknown_ack(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue, "client-individual")
    return outcome(wire, "ACK", id="nothing")


@exchange("ACK of a message for the second time")
def second_ack(place: Place) -> str:
    wire, messages = place.holder("1")
    wire.settle("ACK", messages[0])
    return outcome(wire, "ACK", id=messages[0].headers["ack"])


@exchange("SUBSCRIBE with an `id` that is in use")
def second_subscription(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue)
    return outcome(wire, "SUBSCRIBE", id="0", destination=place.topic)


@exchange("SUBSCRIBE without `id`")
def subscription_without_id(place: Place) -> str:
    wire = place.wire()
    return outcome(wire, "SUBSCRIBE", destination=place.queue)


@exchange("SUBSCRIBE with `ack:sometimes`")
def unknown_ack_mode(place: Place) -> str:
    wire = place.wire()
    return outcome(wire, "SUBSCRIBE", id="0", destination=place.queue, ack="sometimes")


@exchange("UNSUBSCRIBE of an unknown `id`")
def unknown_subscription(place: Place) -> str:
    wire = place.wire()
    return outcome(wire, "UNSUBSCRIBE", id="nothing")


@exchange("SEND without `destination`")
def send_nowhere(place: Place) -> str:
    wire = place.wire()
    return outcome(wire, "SEND", "x")


@exchange("unknown command")
def unknown_command(place: Place) -> str:
    wire = place.wire()
    return outcome(wire, "PUBLISH", "x", destination=place.queue)


@exchange("second CONNECT")
def second_connect(place: Place) -> str:
    wire = place.wire()
    wire.send("CONNECT", accept_version="1.2", host="/", login="guest", passcode="guest")
    return ended(wire, wire.read)


@exchange("SEND before CONNECT")
def send_before_connect(place: Place) -> str:
    return outcome(place.unconnected(), "SEND", "x", destination=place.queue)


@exchange("header with the escape `\\t`")
def undefined_escape(place: Place) -> str:
    wire = place.wire()
    wire.socket.sendall(f"SEND\ndestination:{place.queue}\nodd:a\\tb\nreceipt:r\n\nx\0".encode())
    return ended(wire, lambda: wire.answer("r"))


@exchange("ERROR has the `receipt-id` of its frame")
def receipt_id_of_an_error(place: Place) -> str:
    return "yes" if "receipt-id" in place.wire().ask("ACK", id="nothing").headers else "no"
