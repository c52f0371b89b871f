"""Signed requests are verified and handled in runs, and accepted and refused exactly as if each had come alone."""

import hmac
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any, Final

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from martlet.contracts import Credentials, Identity, LoginOrigin, Nobody, SigningSecret
from martlet.errors import LocalProtocolError, Reason, Refused, RemoteProtocolError
from martlet.message import Message
from martlet_remoting.access.signers import Signers
from martlet_remoting.handlers import acks, send
from martlet_remoting.wire.codec import FrameBuffer, decode_frame, encode_binary_command, encode_command
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import signed_contents

from .conftest import FakeClient, Harness, OpenHarness, long_ext, pull_ext, send_ext
from .signing import SECRETS, allow, check, closed, sign, sign_with_token, tell

V2 = RequestCode.SEND_MESSAGE_V2
ACK = RequestCode.ACK_MESSAGE
END = RequestCode.END_TRANSACTION
PULL = RequestCode.PULL_MESSAGE
V1 = RequestCode.SEND_MESSAGE
BODY = b"a body"
UNSIGNED = "?" * 28  # as long as a signature


def unique(number: int) -> str:
    return f"UNIQ_KEY\x01{number:032X}\x02"


def usual(number: int, user: str | None = "ann", queue_id: int = 0) -> bytes:
    """A send of *user*; not signed if that is None."""
    ext = send_ext("T", queue_id, unique(number))
    return encode_command(Command(V2, sign(user, ext, BODY) if user else ext, BODY, number))


def receive(client: FakeClient, data: bytes) -> str:
    """What the server does with one read; return the error that ends the connection."""
    client.connection.receive_data(data, trio.current_time())
    try:
        for event in client.connection.events():
            client.handle(event)
    except RemoteProtocolError as error:
        return str(error)
    return ""


def answers(client: FakeClient) -> list[Command]:
    frames = FrameBuffer()
    frames.receive_data(b"".join(client.peer.sent))
    client.peer.sent.clear()
    return list(frames.commands())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The identity, number of requests, and number of handled ones of each run of several."""
    found: list[tuple[str, int, int]] = []

    def counted(real: Callable[..., int]) -> Callable[..., int]:
        def run(context: object, gate: Any, requests: Sequence[object], *more: int) -> int:
            count = real(context, gate, requests, *more)
            if len(requests) > 1:
                found.append((gate.identity.name, len(requests), count))
            return count

        return run

    monkeypatch.setattr(send, "send_run", counted(send.send_run))
    monkeypatch.setattr(acks, "ack_run", counted(acks.ack_run))
    return found


async def test_a_run_has_one_signer(harness: Harness, runs: list[tuple[str, int, int]]) -> None:
    client = closed(harness, tell)
    harness.broker.authorizers = (lambda identity, action, name: identity.name != "bob" or action != "publish",)
    for user in ("ann", "bob", None):
        receive(client, usual(1, user))
    users = ["ann"] * 5 + ["bob"] * 3 + ["ann", "bob"] + [None] * 6 + ["ann"] * 4
    receive(client, b"".join(usual(number, user) for number, user in enumerate(users, 10)))
    assert runs == [("ann", 5, 5), ("bob", 3, 0), ("bob", 2, 0), ("", 6, 6), ("ann", 4, 4)]
    said = {answer.opaque: (answer.code, str(answer.remark)) for answer in answers(client)}
    for number, user in enumerate(users, 10):
        assert said[number][0] == (ResponseCode.NO_PERMISSION if user == "bob" else 0)
        assert user != "bob" or "'bob' may not publish to topic[T]" in said[number][1]
    await harness.step()


async def test_the_first_request_of_a_key_is_handled_alone_and_its_next_ones_as_a_run(
    harness: Harness, runs: list[tuple[str, int, int]]
) -> None:
    client = closed(harness, tell)
    receive(client, b"".join(usual(number) for number in range(1, 9)))
    assert runs == [("ann", 7, 7)]
    assert [answer.code for answer in answers(client)] == [0] * 8
    await harness.step()


async def test_authenticators_that_verify_signatures_themselves_get_each_request(
    harness: Harness, runs: list[tuple[str, int, int]]
) -> None:
    client = closed(harness, check)
    receive(client, b"".join(usual(number) for number in range(1, 9)))
    assert runs == []
    assert [answer.code for answer in answers(client)] == [0] * 8
    await harness.step()


async def test_only_the_wrong_request_of_a_read_is_refused(harness: Harness, runs: list[tuple[str, int, int]]) -> None:
    client = closed(harness, tell)
    receive(client, usual(1))
    frames = [usual(number) for number in range(2, 20)]
    frames[4] = frames[4].replace(BODY, b"b body")
    frames[9] = frames[9].replace(b'"e":"0"', b'"e":"1"')
    end = harness.store.appended
    receive(client, b"".join(frames))
    assert [number for _, _, number in runs] == [4, 4, 8]
    refused = {answer.opaque: answer.remark for answer in answers(client) if answer.code}
    assert refused == dict.fromkeys((6, 11), "access key 'ann' or the signature is wrong")
    assert harness.broker.statistics()["refused_by_authenticators"] == 2
    assert harness.state.counters.requests == 19
    assert harness.store.appended > end
    await harness.step()


@pytest.mark.parametrize("signed", [True, False])
async def test_a_run_may_have_a_token(harness: Harness, runs: list[tuple[str, int, int]], signed: bool) -> None:
    client = closed(harness, tell)

    def frame(number: int) -> bytes:
        ext = sign_with_token("ann", send_ext("T", 0, unique(number)), "token", signed=signed)
        return encode_command(Command(V2, ext, b"x", number))

    receive(client, b"".join(map(frame, range(1, 9))))
    assert runs == [("ann", 7, 7)]
    assert [answer.code for answer in answers(client)] == [0] * 8
    await harness.step()


async def test_unsigned_requests_are_refused_one_by_one_where_nobody_may_be_anonymous(
    harness: Harness, runs: list[tuple[str, int, int]]
) -> None:
    def only_signed(credentials: Credentials, origin: LoginOrigin) -> SigningSecret | None:
        if isinstance(credentials, Nobody):
            raise Refused(Reason.CREDENTIALS, "sign your requests")
        return tell(credentials, origin)

    client = closed(harness, only_signed)
    receive(client, b"".join([usual(1), usual(2), usual(3, None), usual(4, None), usual(5), usual(6)]))
    assert runs == [("ann", 2, 2)]
    assert [(answer.opaque, answer.remark) for answer in answers(client) if answer.code] == [
        (3, "sign your requests"),
        (4, "sign your requests"),
    ]
    assert harness.broker.statistics()["refused_by_authenticators"] == 2
    await harness.step()


async def test_a_run_ends_where_the_credentials_change(
    harness: Harness, runs: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request in the middle of a read takes the key away, as an administrator's would."""
    client = closed(harness, tell)
    real = send.send_message

    def revoke(context: Any, command: Command) -> Any:
        monkeypatch.setitem(SECRETS, "ann", b"a new key")
        harness.broker.authentication.changed()
        return real(context, command)

    receive(client, usual(1))
    frames = [usual(number) for number in range(2, 12)]
    ext = sign("ann", send_ext("T", 99, unique(6)), BODY)  # there is no such queue
    frames[4] = encode_command(Command(V2, ext, BODY, 6))
    monkeypatch.setattr(send, "send_message", revoke)
    receive(client, b"".join(frames))
    said = {answer.opaque: answer.code for answer in answers(client)}
    assert runs == [("ann", 10, 4)]
    assert [said[number] for number in range(1, 6)] == [0] * 5
    assert [said[number] for number in range(7, 12)] == [ResponseCode.NO_PERMISSION] * 5
    await harness.step()


async def test_a_signer_whose_identity_expires_is_asked_for_again(
    harness: Harness, runs: list[tuple[str, int, int]]
) -> None:
    ends = [harness.clock.ms + 1000]

    def expiring(credentials: Credentials, origin: LoginOrigin) -> SigningSecret | None:
        told = tell(credentials, origin)
        return told and replace(told, identity=replace(told.identity, expires_ms=ends[-1]))

    client = closed(harness, expiring)
    receive(client, b"".join(usual(number) for number in range(1, 6)))
    harness.clock.ms += 999
    receive(client, b"".join(usual(number) for number in range(6, 11)))
    assert runs == [("ann", 4, 4), ("ann", 5, 5)]
    assert {answer.code for answer in answers(client)} == {0}
    harness.clock.ms += 1
    receive(client, b"".join(usual(number) for number in range(11, 16)))
    assert {answer.code for answer in answers(client)} == {ResponseCode.NO_PERMISSION}
    ends.append(harness.clock.ms + 1000)
    receive(client, b"".join(usual(number) for number in range(16, 21)))
    assert {answer.code for answer in answers(client)} == {0}
    assert runs[2:] == [("ann", 4, 4)]
    await harness.step()


def ack_ext(offset: int, queue_id: int = 0, topic: str = "T") -> dict[str, object]:
    handle = f"0 1700000000000 60000 0 0 broker-a {queue_id} {offset}"
    ext = {"consumerGroup": "G", "topic": topic, "queueId": str(queue_id), "extraInfo": handle, "offset": str(offset)}
    return dict(ext)


async def test_acknowledgements_are_verified_as_a_run(harness: Harness, runs: list[tuple[str, int, int]]) -> None:
    client = closed(harness, tell)
    receive(client, b"".join(usual(number) for number in range(1, 20)))
    answers(client)
    runs.clear()
    frames = [encode_command(Command(ACK, sign("ann", ack_ext(n)), b"", n)) for n in range(10)]
    frames[6] = frames[6].replace(b'"offset":"6"', b'"offset":"7"')
    receive(client, b"".join(frames))
    said = {answer.opaque: answer.code for answer in answers(client)}
    assert said == {n: ResponseCode.NO_PERMISSION if n == 6 else 0 for n in range(10)}
    assert runs == [("ann", 6, 6)]
    receive(client, b"".join(encode_command(Command(ACK, sign("bob", ack_ext(n)), b"", n)) for n in range(10)))
    assert runs[1:] == [("bob", 9, 9)]
    await harness.step()


def end_ext(number: int) -> dict[str, object]:
    ext = {"producerGroup": "P", "tranStateTableOffset": str(number), "commitLogOffset": "0"}
    return {**ext, "commitOrRollback": "8", "fromTransactionCheck": "false", "msgId": "x"}


# The same requests, once in runs and once each by itself.


@dataclass
class Frame:
    """A request as a client makes it, and then as somebody between client and broker changes it."""

    fields: list[tuple[bytes, bytes]]  # JSON of names and values
    code: int = V2
    body: bytes = BODY
    version: int = 479
    flag: int = 0
    more: bytes = b""  # after extFields

    def encode(self, opaque: int) -> bytes:
        fields = b",".join(b"%b:%b" % pair for pair in self.fields)
        end = b'"flag":%d,"language":"JAVA","opaque":%d,"version":%d' % (self.flag, opaque, self.version)
        header = b'{"code":%d,"extFields":{%b},%b%b}' % (self.code, fields, end, self.more)
        return pack(">ii", 4 + len(header) + len(self.body), len(header)) + header + self.body


def quoted(text: str) -> bytes:
    return b'"%b"' % "".join(f"\\u{ord(each):04x}" if each < " " or each in '"\\' else each for each in text).encode()


def escaped(json: bytes) -> bytes:
    """Write the first letter of a JSON text as an escape."""
    return b'"\\u%04x%b' % (json[1], json[2:]) if json[:1] == b'"' and json[1] not in b'"\\' and json[1] < 128 else json


VALUES: Final = (
    *(b"null", b"true", b"false", b"0", b"-0", b"5", b"007", b"1.0", b"1e2", b"9223372036854775808"),
    *(b"18446744073709551616", b"1E400", b"[]", b"{}", b'""', b'"0"', b'"00"', b'" 0"', b'"TRUE"', b'"true"'),
    *(b'"\\ud83d\\ude00"', b'"\\ud83d"', b'"\xff"', b'"a\\/b"', b'"\\u0000"', '"ß"'.encode()),
)
MORE: Final = (b',"remark":null', b',"x":"\xff"', b',"extFields":{"AccessKey":"ann"}', b',"code":34', b',"code":310')
NAMES: Final = (
    *("bname", "ns", "lo", "OnsChannel", "SecurityToken", "Signature", "AccessKey", "_UNIQUE_KEY_QUERY", "accessKey"),
    *("b", "e", "i", "l", "m", "n", "z", "", "\U0001f600", "\uff01", "\u00e4"),
)


@st.composite
def changes(draw: st.DrawFn, frame: Frame) -> None:
    """Change *frame*, as an unusual client or somebody in the middle would."""
    fields = frame.fields
    place = draw(st.integers(0, len(fields) - 1))
    name, value = fields[place]
    match draw(st.sampled_from(("order", "name", "value", "other", "null", "add", "twice", "drop", "version", "more"))):
        case "order":
            frame.fields = draw(st.permutations(fields))
        case "name":
            fields[place] = escaped(name), value
        case "value":
            fields[place] = name, escaped(value)
        case "other":
            fields[place] = name, draw(st.sampled_from(VALUES))
        case "null":
            fields[place] = name, b"null"
        case "add":
            added = quoted(draw(st.sampled_from(NAMES))), draw(st.sampled_from(VALUES))
            fields.insert(draw(st.integers(0, len(fields))), added)
        case "twice":
            again = draw(st.sampled_from((name, escaped(name)))), draw(st.sampled_from((value, *VALUES)))
            fields.insert(draw(st.integers(0, len(fields))), again)
        case "drop":
            del fields[place]
        case "version":
            frame.version = draw(st.sampled_from((0, 399, 401)))
        case _:
            frame.more = draw(
                st.sampled_from((b',"remark":null', b',"x":"\xff"', b',"extFields":{"AccessKey":"ann"}', b',"code":34'))
            )


def fields_of(draw: st.DrawFn, code: int, number: int) -> dict[str, object]:
    if code == ACK:
        return ack_ext(number, draw(st.integers(0, 1)), "acked")
    if code == PULL:
        return pull_ext("empty", 0, draw(st.integers(0, 3)), sysFlag="0")
    if code == V1:
        return long_ext("T", properties=unique(number))
    if code == END:
        return end_ext(number)
    return send_ext("T", draw(st.integers(0, 3)), unique(number))


@st.composite
def requests(draw: st.DrawFn, opaque: int) -> bytes:
    code = draw(st.sampled_from((V2, V2, V2, V2, ACK, END, PULL, V1)))
    ext = fields_of(draw, code, opaque)
    user = draw(st.sampled_from(("ann", "ann", "ann", "ann", "bob", "eve", None)))
    if user is not None:
        ext |= {"AccessKey": user, "Signature": UNSIGNED}
    token = draw(st.sampled_from(("", "", "token")))
    if token:
        ext["SecurityToken"] = token
    frame = Frame([(quoted(name), quoted(str(value))) for name, value in ext.items()], code)
    if code in (ACK, PULL):
        frame.body = b""
    else:
        frame.flag = draw(st.sampled_from((0, 0, FLAG_ONEWAY)))
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):  # by the client, so they are signed
        draw(changes(frame))
    data = frame.encode(opaque)
    if draw(st.booleans()) and draw(st.booleans()):
        data = in_binary(data)
    if user is not None:
        data = signed(draw, data, draw(st.sampled_from((user,) * 8 + ("ann", "bob"))))
    return altered(draw, data)


def request(code: int, number: int, user: str | None) -> bytes:
    if code == V2:
        return usual(number, user)
    ext, body = (ack_ext(number, topic="acked"), b"") if code == ACK else (end_ext(number), BODY)
    return encode_command(Command(code, sign(user, ext, body) if user else ext, body, number))


def with_field(data: bytes, field: bytes) -> bytes:
    return with_header(data, data[8 : body_start(data)].replace(b'"extFields":{', b'"extFields":{' + field))


@pytest.mark.parametrize("code", [V2, END, ACK])
async def test_the_last_of_several_codes_counts_in_a_run_as_it_does_alone(harness: Harness, code: int) -> None:
    client = closed(harness, tell)
    receive(client, usual(1))
    answers(client)
    frames = [request(code, number, "ann") for number in range(10, 16)]
    again = [data[8 : body_start(data)].replace(b',"flag":', b',"code":99999,"flag":') for data in frames]
    frames = [with_header(data, header) for data, header in zip(frames, again, strict=True)]
    assert receive(client, b"".join(frames)) == ""
    assert {answer.code for answer in answers(client)} == {ResponseCode.REQUEST_CODE_NOT_SUPPORTED}
    await harness.step()


NO_JSON: Final = (b'"\xff"', b'"\\q"', b'"\\ud83d"', b'"a\x01"', b"1E400", b"[" * 600 + b"]" * 600)


@pytest.mark.parametrize("value", NO_JSON, ids=["bytes", "escape", "surrogate", "control", "number", "depth"])
@pytest.mark.parametrize("code", [V2, END, ACK])
@pytest.mark.parametrize("user", ["ann", None], ids=["signed", "unsigned"])
async def test_a_field_that_is_not_json_means_the_same_in_a_run_and_alone(
    harness: Harness, value: bytes, code: int, user: str | None
) -> None:
    closed(harness, tell)
    harness.topic("acked")
    for _ in range(30):
        harness.broker.publish(Message("acked", b"x", queue_id=0))
    harness.store.committer.commit()
    found = []
    for together in True, False:
        client = harness.client()
        client.connection.takes_runs = together
        for name in ("ann", None):
            receive(client, usual(1, name))
        answers(client)
        frames = [request(code, number, user) for number in range(10, 16)]
        frames[3] = with_field(frames[3], b'"z":%b,' % value)
        found.append(outcome(harness, client, frames, together))
        client.close()
        await harness.step()
    assert found[0] == found[1]


def put_number(frame: Frame) -> None:
    """As the C++ client."""
    frame.fields = [
        (name, value.strip(b'"') if name in (b'"e"', b'"g"', b'"k"') else value) for name, value in frame.fields
    ]


def put_unknown(frame: Frame) -> None:
    frame.fields.insert(3, (b'"ns"', b'"namespace"'))


def put_null(frame: Frame) -> None:
    frame.fields.insert(3, (b'"bname"', b"null"))


def put_escapes(frame: Frame) -> None:
    frame.fields = [
        (escaped(name), value if value == quoted(UNSIGNED) else escaped(value)) for name, value in frame.fields
    ]


def put_astral_names(frame: Frame) -> None:
    frame.fields += [(quoted("\uff01"), b'"2"'), (quoted("\U0001f600"), b'"1"')]


def put_old_unique_key(frame: Frame) -> None:
    """Clients up to 4.9.3 do not sign it."""
    frame.fields += [(b'"_UNIQUE_KEY_QUERY"', b'"true"')]
    frame.version = 399


def put_unique_key(frame: Frame) -> None:
    frame.fields += [(b'"_UNIQUE_KEY_QUERY"', b'"true"')]
    frame.version = 401


def put_twice(frame: Frame) -> None:
    frame.fields.insert(0, (b'"b"', b'"another topic"'))


def turn(frame: Frame) -> None:
    frame.fields.reverse()


@pytest.mark.parametrize("binary", [False, True], ids=["JSON", "ROCKETMQ"])
@pytest.mark.parametrize(
    "change",
    [
        put_number,
        put_unknown,
        put_null,
        put_old_unique_key,
        put_unique_key,
        put_escapes,
        put_astral_names,
        put_twice,
        turn,
    ],
)
async def test_unusual_but_right_requests_are_in_runs(
    harness: Harness, runs: list[tuple[str, int, int]], change: Callable[[Frame], None], binary: bool
) -> None:
    client = closed(harness, tell)
    receive(client, usual(1))
    frames: list[bytes] = []
    for number in range(2, 8):
        ext = {**send_ext("T", 0, unique(number)), "AccessKey": "ann", "Signature": UNSIGNED}
        frame = Frame([(quoted(name), quoted(str(value))) for name, value in ext.items()])
        change(frame)
        data = frame.encode(number)
        data = in_binary(data) if binary else data
        frames.append(data.replace(UNSIGNED.encode(), signatures(data, "ann")[0]))
    frames[3] = frames[3].replace(BODY, b"b body")
    receive(client, b"".join(frames))
    assert runs == [("ann", 3, 3), ("ann", 2, 2)]
    assert [answer.opaque for answer in answers(client) if answer.code] == [5]
    await harness.step()


def in_binary(data: bytes) -> bytes:
    try:
        return encode_binary_command(decode_frame(data))
    except (RemoteProtocolError, LocalProtocolError):
        return data


def signatures(data: bytes, user: str) -> list[bytes]:
    """Return the right signature of a request; if it has a token, also that without it."""
    command = decode_frame(data)
    secret = SECRETS.get(user, b"of eve")
    return [b64encode(hmac.digest(secret, content + command.body, "sha1")) for content in signed_contents(command)]


def signed(draw: st.DrawFn, data: bytes, user: str) -> bytes:
    """Replace the missing signature by one, mostly the right one."""
    try:
        mac = draw(st.sampled_from(signatures(data, user)))
    except RemoteProtocolError:
        return data
    wrong = (mac.swapcase(), mac[::-1], mac[:-1] + b" ", mac[:-1] + b"\n", b"=" * 28)
    return data.replace(UNSIGNED.encode(), draw(st.sampled_from((mac,) * 20 + wrong)))


def altered(draw: st.DrawFn, data: bytes) -> bytes:
    """Change *data* after it was signed, mostly not at all."""
    match draw(st.integers(0, 15)):
        case 0:
            place = draw(st.integers(8, len(data) - 1))
            return data[:place] + bytes((draw(st.integers(0, 255)),)) + data[place + 1 :]
        case 1:
            return data.replace(b'"ann"', b'"bob"')
        case 2:
            return data[:-1] + b"!"
        case 3:
            return data.replace(b'"e":"0"', b'"e":"1"').replace(b'"offset":"1', b'"offset":"2')
        case 4:
            field = draw(st.sampled_from((b'"z":"x",', b'"z":"",', b'"lo":null,', b'"b":"other",', b'"j":"0",')))
            return with_field(data, field)
        case 5:
            return with_header(data, data[8 : body_start(data)].replace(b'"m":"false"', b'"m":"false","b":"T2"'))
    return data


def body_start(data: bytes) -> int:
    return 8 + int.from_bytes(data[5:8], "big")


def with_header(data: bytes, header: bytes) -> bytes:
    body = data[body_start(data) :]
    return pack(">i", 4 + len(header) + len(body)) + data[4:5] + len(header).to_bytes(3, "big") + header + body


@st.composite
def reads(draw: st.DrawFn) -> list[bytes]:
    return [draw(requests(10 + number)) for number in range(draw(st.integers(1, 8)))]


HIDDEN: Final = ("msgId", "queueOffset", "transactionId")


def outcome(harness: Harness, client: FakeClient, frames: Sequence[bytes], together: bool) -> tuple[object, ...]:
    """All that *frames* bring about."""
    topic = harness.broker.topics.get("T")
    assert topic is not None
    authentication, counters = harness.broker.authentication, harness.state.counters
    before = authentication.refused, counters.requests, [topic.queue(each).next_offset for each in range(4)]
    end = harness.store.appended
    error = ""
    for data in [b"".join(frames)] if together else frames:
        if error := receive(client, data):
            break
    said = [  # a run answers its ends of transactions last
        (
            each.opaque,
            each.code,
            str(each.remark).replace(client.peer.address, "CLIENT"),
            {k: v for k, v in each.ext.items() if k not in HIDDEN},
        )
        for each in sorted(answers(client), key=lambda each: each.opaque)
    ]
    stored = [topic.queue(each).next_offset - offset for each, offset in enumerate(before[2])]
    refused, handled = authentication.refused - before[0], counters.requests - before[1]
    return said, error, stored, harness.store.appended - end, refused, handled


async def test_runs_accept_and_refuse_exactly_what_is_accepted_and_refused_alone(
    open_harness: OpenHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await open_harness(store={"flush": "async"}, broker={"auto_create_topics": False})
    closed(harness, tell)
    harness.topic("empty")
    harness.topic("acked")
    for number in range(30):
        harness.broker.publish(Message("acked", b"x", queue_id=number % 2))
    harness.broker.authorizers = (allow_all_but_bob,)
    accepted = refused = 0

    @settings(max_examples=400, deadline=None)
    @given(reads())
    def compare(frames: list[bytes]) -> None:
        nonlocal accepted, refused
        clients = [harness.client(), harness.client()]
        clients[1].connection.takes_runs = False
        for client in clients:
            for user in ("ann", "bob", None):
                receive(client, usual(1, user))
            ext = sign_with_token("ann", send_ext("T", 0, unique(2)), "token", signed=False)
            receive(client, encode_command(Command(V2, ext, b"x", 2)))
            answers(client)
        found = outcome(harness, clients[0], frames, together=True)
        with monkeypatch.context() as alone:  # without any fast way
            alone.setattr(Signers, "_signer_of_record", lambda self, command, raw: None)
            expected = outcome(harness, clients[1], frames, together=False)
        for client in clients:
            client.close()
        harness.store.committer.commit()
        assert found == expected
        codes = [each[1] for each in found[0]]  # type: ignore[attr-defined]
        accepted += codes.count(0)
        refused += codes.count(ResponseCode.NO_PERMISSION)

    compare()
    assert accepted > 100, "most frames are right"
    assert refused > 100
    await harness.step()


def allow_all_but_bob(identity: Identity, action: str, name: str) -> bool:
    return identity.name in ("", "ann") or allow(identity, action, name)
