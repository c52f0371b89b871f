"""Requests signed as RocketMQ's AclClientRPCHook signs them: each request acts with the identity that signed it.

The expected bytes follow RocketMQ 4.9.8 acl/src/main/java/org/apache/rocketmq/acl/common/AclUtils.java
combineRequestContent and AclSigner.java: HMAC-SHA1 over the values of a TreeMap of the header fields and the body.
"""

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Mapping

import pytest

from martlet.contracts import Credentials, Identity, LoginOrigin, SignedRequest
from martlet.errors import Reason, Refused
from martlet_remoting.handler import signed_request
from martlet_remoting.wire.codes import VERSION_4_9_3, VERSION_4_9_4, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import SigningKey, signed_content

from .conftest import FakeClient, Harness, pull_ext, send_ext

V2 = RequestCode.SEND_MESSAGE_V2
SECRETS = {"ann": b"ann's key", "bob": b"bob's key"}


def sign(user: str, ext: Mapping[str, object], body: bytes = b"", secret: bytes | None = None) -> dict[str, object]:
    fields = {**ext, "AccessKey": user}
    content = "".join(str(fields[name]) for name in sorted(fields)).encode() + body
    mac = hmac.new(SECRETS[user] if secret is None else secret, content, hashlib.sha1)
    return {**fields, "Signature": b64encode(mac.digest()).decode()}


def check(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
    if not isinstance(credentials, SignedRequest):
        return None
    mac = hmac.digest(SECRETS.get(credentials.access_key, b"?"), credentials.content, "sha1")
    if not hmac.compare_digest(b64encode(mac).decode(), credentials.signature):
        raise Refused(Reason.CREDENTIALS, f"signature of {credentials.access_key!r} is wrong")
    return Identity(credentials.access_key)


def allow(identity: Identity, action: str, name: str) -> bool:
    return identity.name == "ann" or (identity.name == "bob" and action == "read")


@pytest.fixture
def client(harness: Harness) -> FakeClient:
    harness.topic("T")
    harness.broker.authentication.authenticators = (check,)
    harness.broker.authorizers = (allow,)
    return harness.client()


@pytest.mark.parametrize(
    ("version", "signed"), [(VERSION_4_9_3, b"trueGtopic5body"), (VERSION_4_9_4, b"truefalseGtopic5body")]
)
def test_the_signature_covers_the_sorted_fields_and_the_body(version: int, signed: bytes) -> None:
    ext = {"b": "topic", "a": "G", "n": 5, "B": True, "Signature": "?", "_UNIQUE_KEY_QUERY": "false", "none": None}
    assert signed_content(Command(V2, ext, b"body", version=version)) == signed


def test_a_request_without_an_access_key_is_not_signed() -> None:
    assert signed_request(Command(V2, {"Signature": "x"})) is None
    found = signed_request(Command(V2, {"AccessKey": "a", "SecurityToken": "t"}, b"x"))
    assert found == SignedRequest("a", "", b"atx", "t")


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
