"""Coverage-guided fuzzing of what a peer can send, frames, headers, batches, bodies, records, and of access rules.

    pip install atheris
    python tests/fuzz/decoders.py -max_total_time=600

A decoder may refuse its input with one of Martlet's errors; anything else is a defect. The
tests of the codecs do the same with hypothesis at every run.
"""

import sys

import atheris

with atheris.instrument_imports():
    from martlet.errors import MartletError
    from martlet.message import decode_properties
    from martlet.net.opening.proxy_header import ProxyHeader
    from martlet.records.codec import decode_records
    from martlet.runtime.steps import finish_now
    from martlet_acl.policy.document import decode_document, document_of, fill_policies
    from martlet_remoting.wire.batches import decode_batch
    from martlet_remoting.wire.codec import FrameBuffer
    from martlet_remoting.wire.fastjson import loads
    from martlet_remoting.wire.headers import decode_pull_header, decode_send_header
    from martlet_stomp.wire.codec import Limits
    from martlet_stomp.wire.connection import StompConnection
    from martlet_stomp.wire.packets import Version
    from martlet_stomp.wire.scanner import known_heads

STOMP_LIMITS = Limits(connect_bytes_max=10_000, frame_bytes_max=10_000, head_bytes_max=4000, header_bytes_max=500)


def frames(data: bytes) -> None:
    """Feed *data* in two pieces, and take every command's headers apart."""
    buffer = FrameBuffer(1 << 20)
    middle = data[0] % (len(data) + 1) if data else 0
    for piece in (data[:middle], data[middle:]):
        buffer.receive_data(piece)
        for command in buffer.commands():
            for decode in (decode_send_header, decode_pull_header):
                try:
                    decode(command)
                except MartletError:
                    continue


def bodies(data: bytes) -> None:
    """Read *data* as JSON in any dialect; anything else raises ValueError."""
    try:
        loads(data)
    except ValueError:
        return


def stomp(data: bytes) -> None:
    """Feed *data* in two pieces to a connection of any version; nothing may be kept beyond the limits."""
    connection = StompConnection(known_heads(STOMP_LIMITS), 0.0)
    if data and data[0] < 0xF0:
        version = list(Version)[data[0] % 3]
        accept = b"" if version is Version.V1_0 else b"accept-version:%b\n" % version.text.encode()
        connection.receive_data(b"CONNECT\n%b\n\0" % accept, 0.0)
        list(connection.events())
        connection.open(0, 0.0)
    middle = len(data) // 2
    for piece in (data[1:middle], data[middle:]):
        connection.receive_data(piece, 0.0)
        list(connection.events())
        assert connection.buffered_bytes <= STOMP_LIMITS.frame_bytes_max


def rules(data: bytes) -> None:
    """Read *data* as a document of users and rules; what is accepted can be stored."""
    document_of(finish_now(fill_policies(finish_now(decode_document(data)))))


def proxy_header(data: bytes) -> None:
    """Feed *data* in two pieces as the header of a proxy."""
    header, middle = ProxyHeader(), len(data) // 2
    for piece in (data[:middle], data[middle:]):
        if not header.is_complete:
            assert header.receive_data(piece) <= len(piece)


def one_input(data: bytes) -> None:
    """Try each decoder on the rest of *data*; the first byte says which."""
    decoders = (frames, decode_batch, bodies, decode_records, decode_properties, stomp, rules, proxy_header)
    if not data:
        return
    try:
        decoders[data[0] % len(decoders)](data[1:])
    except MartletError:
        return


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
