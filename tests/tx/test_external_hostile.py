"""Requests for external transactions with fields of any kind: each is answered, and none harms what others do."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
from tests.remoting.conftest import send_ext
from tests.remoting.test_plugin import SEND, Caller

from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

from .test_external_remoting import ABORT, BEGIN, COMMIT, LIST, STAGE, SparkSink, serving

PREPARE = RequestCode.PREPARE_EXTERNAL_TRANSACTION
NAMED: Final = {"producer": "query", "epoch": "0", "sequence": "7"}
BATCH: Final = encode_batch([BatchMessage(b"x", b"")])
PARTS: Final = b'{"parts": [["a", 1]]}'
# A request that is understood, of each code, and its body.
REQUESTS: Final[dict[int, tuple[dict[str, Any], bytes]]] = {
    BEGIN: ({"producer": "query", "run": "r", "began": "5", "brokers": "b,c", "known": "false"}, b""),
    STAGE: ({**send_ext("T", 1), **NAMED, "part": "a", "chunk": "0"}, BATCH),
    PREPARE: ({**NAMED, "last": "false"}, PARTS),
    COMMIT: ({**NAMED, "last": "false", "prepared": "false"}, PARTS),
    ABORT: ({**NAMED, "prepared": "false"}, b'{"parts": ["a"]}'),
    LIST: ({"identity": "", "producer": "", "count": "5"}, b""),
}
VALUES: Final[list[Any]] = [
    *(
        "",
        "-1",
        "9" * 18,
        str((1 << 63) - 1),
        str(-(1 << 63)),
        str(1 << 63),
        "9" * 5000,
        "1.5",
        "1e3",
        "x",
        " ",
        "\x00",
    ),
    *("\x01\x02", "\U0001f600" * 255, "x" * 65_536, "a,b" * 4000, ",", "true", "null"),
    *(None, True, 7, -1, 1 << 70, 1.5, [], ["a"], {}, {"a": 1}),
]
BODIES: Final = [
    *(
        b"",
        b"x",
        b"[]",
        b"{",
        b"{}",
        b"null",
        b'"a"',
        b"\xff\xfe",
        b'{"parts": null}',
        b'{"parts": {}}',
        b'{"parts": "ab"}',
    ),
    *(b'{"parts": [7]}', b'{"parts": [null]}', b'{"parts": [[]]}', b'{"parts": [["a"]]}', b'{"parts": [["a", 1, 2]]}'),
    *(b'{"parts": [[1, "a"]]}', b'{"parts": [["a", true]]}', b'{"parts": [["a", 1.0]]}', b'{"parts": [["a", 1e400]]}'),
    *(b'{"parts": [["a", %d]]}' % (10**30), b'{"parts": [["\\ud800", 1]]}', b'{"parts": ["\\ud800"]}'),
    *(b'{"parts": [["%b", 1]]}' % (b"x" * 65_536), b'{"parts": [["\xff", 1]]}', b'{"parts": %b}' % (b"[" * 5000)),
    b'{"parts": [%b]}' % b",".join([b'["%d", 1]' % number for number in range(10_001)]),
]
_numbers = count(1_000_000)


async def ask(client: Caller, code: int, ext: object, body: bytes) -> Command:
    """Send a request whose header fields may be anything that JSON can say."""
    opaque = next(_numbers)
    fields = {"code": code, "flag": 0, "language": "JAVA", "opaque": opaque, "version": 1, "extFields": ext}
    header = json.dumps(fields).encode()
    size = 4 + len(header) + len(body)
    await client.stream.send_all(size.to_bytes(4, "big") + len(header).to_bytes(4, "big") + header + body)
    while (answer := await client.receive()).opaque != opaque or not answer.is_response:
        pass
    return answer


def hostile(code: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield requests of *code* with a wrong field or body."""
    ext, body = REQUESTS[code]
    for name in ext:
        yield {other: value for other, value in ext.items() if other != name}, body
        for value in VALUES:
            yield {**ext, name: value}, body
    for number, wrong in enumerate(BODIES, 1000):
        yield {**ext, **({"sequence": str(number)} if "sequence" in ext else {})}, wrong  # not committed before


@pytest.mark.parametrize("code", REQUESTS)
async def test_any_field_is_answered_and_harms_nobody(code: int, tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        good, bad = SparkSink(await running.connect(), "good"), await running.connect()
        await good.begin("run")
        await good.stage(3, "a", 0, [b"one"])
        for ext, body in hostile(code):
            answer = await ask(bad, code, ext, body)
            assert not str(answer.remark).startswith("internal"), (ext, body, answer.remark)
            assert answer.code in CODES, (ext, body, answer.remark)
        assert (await good.stage(3, "a", 1, [b"two"])).code == 0
        assert (await good.end(COMMIT, 3, [["a", 2]])).ext["messages"] == "2"
        assert (await good.client.ask(SEND, send_ext("T", 1), b"plain")).code == 0
        assert [body for body in await good.received() if body != b"x"] == [b"one", b"two", b"plain"]


CODES: Final = {0, 1, 2, 13, 16, 17, 22, 29, 604}
