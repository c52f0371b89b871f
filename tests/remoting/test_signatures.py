"""Requests signed as RocketMQ's AclClientRPCHook signs them: each request acts with the identity that signed it."""

from struct import pack

import pytest
import trio

from martlet.access.signers import SLICE_BYTES
from martlet.contracts import AccessKey, Credentials, LoginOrigin, SigningSecret
from martlet_remoting.access import signers
from martlet_remoting.wire.codec import decode_frame
from martlet_remoting.wire.codes import VERSION_4_9_3, VERSION_4_9_4, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import SigningKey, is_signed, signed_contents, signed_values

from .conftest import FakeClient, Harness, OpenHarness, pull_ext, send_ext
from .signing import SECRETS, check, closed, sign, sign_with_token, tell

V2 = RequestCode.SEND_MESSAGE_V2


@pytest.fixture(params=[tell, check])
def client(harness: Harness, request: pytest.FixtureRequest) -> FakeClient:
    return closed(harness, request.param)


@pytest.mark.parametrize(("version", "signed"), [(VERSION_4_9_3, b"trueGtopic5"), (VERSION_4_9_4, b"truefalseGtopic5")])
def test_the_signature_covers_the_sorted_fields(version: int, signed: bytes) -> None:
    ext = {"b": "topic", "a": "G", "n": 5, "B": True, "Signature": "?", "_UNIQUE_KEY_QUERY": "false", "none": None}
    assert signed_values(ext, version) == signed


def test_fields_are_in_the_order_of_javas_strings() -> None:
    # As java.util.TreeMap: U+1F600 begins with the surrogate U+D83D, which is less than U+FF01.
    ext = {"\uff01": "3", "\U0001f600": "2", "a": "1", "\uffff": "4"}
    assert max(ext) == "\U0001f600"
    assert signed_values(ext, VERSION_4_9_4) == b"1234"


def test_go_clients_do_not_sign_their_token() -> None:
    ext = {"AccessKey": "a", "SecurityToken": "t", "b": "x", "Signature": "?"}
    assert signed_contents(Command(V2, ext)) == [b"atx", b"ax"]
    assert signed_contents(Command(V2, {**ext, "SecurityToken": ""})) == [b"ax"]


@pytest.mark.parametrize(
    ("fields", "signed"),
    [
        (b'{"AccessKey":"a"}', True),
        (b'{"\\u0041ccessKey":"a"}', True),
        (b'{"Acces\\u0073Key":"a"}', True),
        (b'{"AccessKey":5}', True),
        (b'{"AccessKey":""}', False),
        (b'{"AccessKey":null}', False),
        (b'{"accessKey":"a","b":"\\u0001"}', False),
        (b'{"Signature":"x"}', False),
        (b"null", False),
    ],
)
@pytest.mark.parametrize("code", [V2, RequestCode.SEND_MESSAGE])
def test_a_request_is_signed_if_it_has_an_access_key(fields: bytes, signed: bool, code: int) -> None:
    header = b'{"code":%d,"opaque":1,"extFields":%b}' % (code, fields)
    command = decode_frame(pack(">ii", 4 + len(header), len(header)) + header)
    assert is_signed(command) is signed


async def test_each_request_acts_for_its_signer(client: FakeClient) -> None:
    send = send_ext("T")
    assert (await client.ask(V2, sign("ann", send, b"x"), b"x")).code == 0
    for ext in (sign("bob", send, b"x"), send):
        answer = await client.ask(V2, ext, b"x")
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "may not publish to topic[T]" in str(answer.remark)
    assert (await client.ask(V2, sign("ann", send, b"x"), b"x")).code == 0
    stats = {"topic": "T"}
    assert (await client.ask(RequestCode.GET_TOPIC_STATS_INFO, sign("bob", stats))).code == 0
    assert (await client.ask(RequestCode.GET_TOPIC_STATS_INFO, stats)).code == ResponseCode.NO_PERMISSION


async def test_refusals_may_have_the_code_of_acl_1(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, acl_errors="1.0")
    client = closed(harness, tell)
    for ext in (sign("bob", send_ext("T"), b"x"), sign("ann", send_ext("T"), b"y")):
        assert (await client.ask(V2, ext, b"x")).code == ResponseCode.SYSTEM_ERROR
    pull = client.send(RequestCode.PULL_MESSAGE, sign("bob", pull_ext("T", 0, sysFlag="6")))
    await harness.step()
    harness.broker.authorizers = (lambda identity, action, name: action == "publish",)
    await client.ask(V2, sign("ann", send_ext("T"), b"x"), b"x")
    assert client.answers[pull].code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("change", ["body", "field", "secret", "user", "signature"])
async def test_a_wrong_signature_is_refused_and_nothing_happens(
    harness: Harness, client: FakeClient, change: str
) -> None:
    ext, body = sign("ann", send_ext("T"), b"x", b"guess" if change == "secret" else None), b"x"
    if change == "body":
        body = b"y"
    elif change != "secret":
        ext |= {"field": {"e": "3"}, "user": {"AccessKey": "bob"}, "signature": {"Signature": ""}}[change]
    end = harness.store.appended
    answer = await client.ask(V2, ext, body)
    assert answer.code == ResponseCode.NO_PERMISSION
    assert str(answer.remark).endswith("is wrong")
    assert harness.store.appended == end
    assert harness.broker.statistics()["refused_by_authenticators"] == 1


@pytest.mark.parametrize("signed", [True, False])
async def test_a_token_may_be_signed_or_not(client: FakeClient, signed: bool) -> None:
    ext = sign_with_token("ann", send_ext("T"), "token", signed=signed)
    assert (await client.ask(V2, ext, b"x")).code == 0
    assert (await client.ask(V2, {**ext, "e": "3"}, b"x")).code == ResponseCode.NO_PERMISSION
    assert (await client.ask(V2, {**ext, "SecurityToken": None}, b"x")).code == (
        ResponseCode.NO_PERMISSION if signed else 0
    )


async def test_a_connection_asks_once_for_a_secret_until_credentials_change(harness: Harness) -> None:
    asked: list[AccessKey] = []

    def count(credentials: Credentials, origin: LoginOrigin) -> SigningSecret | None:
        if isinstance(credentials, AccessKey):
            asked.append(credentials)
        return tell(credentials, origin)

    client, pull = closed(harness, count), pull_ext("T", 0)
    for _ in range(3):
        assert (await client.ask(RequestCode.PULL_MESSAGE, sign("bob", pull))).code != ResponseCode.NO_PERMISSION
    assert asked == [AccessKey("bob")]
    harness.broker.authentication.changed()
    for _ in range(3):
        assert (await client.ask(RequestCode.PULL_MESSAGE, sign("bob", pull))).code != ResponseCode.NO_PERMISSION
    assert len(asked) == 2
    guess = sign("ann", pull, secret=b"guess")
    for _ in range(3):
        assert (await client.ask(RequestCode.PULL_MESSAGE, guess)).code == ResponseCode.NO_PERMISSION
    assert len(asked) == 5, "a key that has proved nothing is not remembered"


async def test_a_changed_secret_counts_from_the_next_request_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, pull = closed(harness, tell), sign("bob", pull_ext("T", 0))
    assert (await client.ask(RequestCode.PULL_MESSAGE, pull)).code != ResponseCode.NO_PERMISSION
    monkeypatch.setitem(SECRETS, "bob", b"new key")
    harness.broker.authentication.changed()
    assert (await client.ask(RequestCode.PULL_MESSAGE, pull)).code == ResponseCode.NO_PERMISSION
    renewed = sign("bob", pull_ext("T", 0))
    assert (await client.ask(RequestCode.PULL_MESSAGE, renewed)).code != ResponseCode.NO_PERMISSION


async def test_a_connection_remembers_a_few_keys(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signers, "KEYS_MAX", 4)
    client = closed(harness, tell)
    for number in range(10):
        ext = sign_with_token("ann", send_ext("T"), f"token {number}", signed=True)
        assert (await client.ask(V2, ext, b"x")).code == 0
    kept = client.handler._signers
    assert kept is not None
    assert len(kept._proved) <= 4
    ext = sign_with_token("ann", send_ext("T"), "t" * (signers.KEY_CHARS_MAX + 1), signed=True)
    assert (await client.ask(V2, ext, b"x")).code == 0
    assert len(max(token for _, token in kept._proved)) < 10


async def test_a_long_body_is_verified_in_slices_and_later_requests_wait(harness: Harness, client: FakeClient) -> None:
    body = bytes(3 * SLICE_BYTES)
    wrong = sign("ann", send_ext("T"), body + b"!")
    before = harness.broker.turns.slices
    for ext, code in (sign("ann", send_ext("T"), body), 0), (wrong, ResponseCode.NO_PERMISSION):
        handled = client.handler.handle(Command(V2, ext, body, opaque=7))
        assert handled is not None, "the server reads no further request of this client before that is done"
        await handled
        await harness.step()
        assert client.answers.pop(7).code == code
    is_told = harness.broker.authentication.authenticators == (tell,)
    assert harness.broker.turns.slices - before == (8 if is_told else 2)
    assert harness.state.counters.requests == 2
    assert harness.broker.statistics()["refused_by_authenticators"] == 1
    record = harness.store.lookup.record_at(0)
    assert record is not None
    assert len(record) > len(body)


async def test_a_key_that_is_taken_away_while_a_long_body_is_verified_has_signed_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, body, end = closed(harness, tell), bytes(3 * SLICE_BYTES), harness.store.appended
    before = harness.broker.turns.slices
    client.send_command(Command(V2, sign("ann", send_ext("T"), body), body, opaque=7))
    while harness.broker.turns.slices == before:
        await trio.lowlevel.checkpoint()
    monkeypatch.setitem(SECRETS, "ann", b"new key")
    harness.broker.authentication.changed()
    await harness.step()
    assert client.answers.pop(7).code == ResponseCode.NO_PERMISSION
    assert harness.store.appended == end


async def test_a_held_pull_is_answered_with_the_rights_of_its_signer(harness: Harness, client: FakeClient) -> None:
    waiting = pull_ext("T", 0, sysFlag="6", suspendTimeoutMillis="30000")
    pull = client.send(RequestCode.PULL_MESSAGE, sign("bob", waiting))
    await harness.step()
    assert client.answers == {}
    other = harness.client()
    assert (await other.ask(V2, sign("ann", send_ext("T", 0), b"x"), b"x")).code == 0
    await harness.step()
    assert client.answers.pop(pull).code == 0
    # The next one waits when the rules change.
    pull = client.send(RequestCode.PULL_MESSAGE, sign("bob", {**waiting, "queueOffset": "1"}))
    harness.broker.authorizers = (lambda identity, action, name: identity.name == "ann",)
    assert (await other.ask(V2, sign("ann", send_ext("T", 0), b"x"), b"x")).code == 0
    await harness.step()
    assert client.answers.pop(pull).code == ResponseCode.NO_PERMISSION


async def test_a_client_signs_as_the_java_hook_does(client: FakeClient) -> None:
    key = SigningKey("ann", SECRETS["ann"].decode())
    ext = send_ext("T")
    assert key.sign(V2, ext, b"x") == sign("ann", ext, b"x")
    assert (await client.ask(V2, key.sign(V2, ext, b"x"), b"x")).code == 0
    query = {"topic": "T", "key": "k", "maxNum": "1", "beginTimestamp": "0", "endTimestamp": "1"}
    signed = key.sign(RequestCode.QUERY_MESSAGE, {**query, "_UNIQUE_KEY_QUERY": "true"}, b"")
    assert (await client.ask(RequestCode.QUERY_MESSAGE, signed)).code == ResponseCode.QUERY_NOT_FOUND


def test_a_signing_key_needs_both_parts_and_hides_the_secret() -> None:
    assert "s3cret" not in repr(SigningKey("ann", "s3cret"))
    with pytest.raises(ValueError, match="access key '' is empty; give the name"):
        SigningKey("", "s3cret")
    with pytest.raises(ValueError, match="secret of access key 'ann' is empty"):
        SigningKey("ann", "")
