"""Beginning and ending connections, heart-beats and receipts."""

from .place import Place, ended, exchange


@exchange("CONNECT, `accept-version:1.0,1.1,1.2`")
def connect_versions(place: Place) -> str:
    connected = place.wire(accept_version="1.0,1.1,1.2").connected
    return f"{connected.command} {connected.headers['version']}"


@exchange("CONNECT, no `accept-version`")
def connect_of_1_0(place: Place) -> str:
    wire = place.unconnected()
    wire.send("CONNECT", login="guest", passcode="guest")
    connected = wire.read()
    return f"{connected.command} {connected.headers.get('version')}"


@exchange("CONNECT, `accept-version:9.9`")
def connect_unknown_version(place: Place) -> str:
    wire = place.wire(accept_version="9.9")
    return ended(wire, lambda: wire.connected)


@exchange("CONNECT, `host:nowhere`")
def connect_unknown_host(place: Place) -> str:
    return place.wire(host="nowhere").connected.command


@exchange("CONNECT, `heart-beat:0,0`")
def no_heart_beats(place: Place) -> str:
    return place.wire(heart_beat="0,0").connected.headers["heart-beat"]


@exchange("CONNECT, `heart-beat:0,600`: heart-beats come")
def heart_beats_come(place: Place) -> str:
    wire = place.wire(heart_beat="0,600")
    for _ in range(2):
        wire.wait_beat()
    return "yes"


@exchange("CONNECT, `heart-beat:600,0`, then silence")
def silent_client(place: Place) -> str:
    wire = place.wire(heart_beat="600,0")
    wire.wait_closed()
    return "closed"


@exchange("DISCONNECT with `receipt`")
def disconnect(place: Place) -> str:
    wire = place.wire()
    wire.do("DISCONNECT")
    wire.wait_closed()
    return "RECEIPT, closed"


@exchange("`receipt` of SUBSCRIBE, SEND, BEGIN, COMMIT, ABORT, ACK, UNSUBSCRIBE, DISCONNECT")
def receipts(place: Place) -> str:
    wire = place.wire()
    wire.subscribe(place.queue, "client-individual")
    wire.publish(place.queue, "x")
    for last in ("COMMIT", "ABORT"):
        wire.do("BEGIN", transaction="t")
        wire.do(last, transaction="t")
    wire.settle("ACK", wire.message())
    wire.do("UNSUBSCRIBE", id="0")
    wire.do("DISCONNECT")
    return "RECEIPT each"
