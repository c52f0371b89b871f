"""Headers of answers that RocketMQ's servers do not send."""

import socket
import threading
from struct import Struct

import orjson
import pytest

from martlet.errors import RemoteProtocolError
from martlet_spark.connection import BrokerConnection, Security

GOOD = {"opaque": 1, "code": 0, "flag": 1}


@pytest.mark.parametrize(
    "header",
    [
        [],
        "text",
        None,
        {},
        {**GOOD, "flag": "1"},
        {**GOOD, "code": "0"},
        {**GOOD, "opaque": [1]},
        {**GOOD, "opaque": None},
        {**GOOD, "extFields": ["a"]},
        {**GOOD, "extFields": "a"},
    ],
    ids=str,
)
def test_a_header_with_other_types_fails_the_request(header: object) -> None:
    with pytest.raises(RemoteProtocolError, match="sent a header that is not one of RocketMQ's"):
        answer_to(header)


def test_a_header_may_lack_its_fields() -> None:
    assert answer_to({**GOOD, "extFields": None}) == {}


def answer_to(header: object) -> object:
    """Return the fields of an answer with *header*, as a request got it."""
    encoded = orjson.dumps(header)

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(1 << 16)
            peer.sendall(Struct(">ii").pack(4 + len(encoded), len(encoded)) + encoded)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        connection = BrokerConnection(f"127.0.0.1:{listener.getsockname()[1]}", Security(), 60.0)
        try:
            return connection.request(1, {}).ext
        finally:
            connection.close()
            thread.join()
