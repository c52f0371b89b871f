"""Who a request to the name server is from: its signer, the owner of a certificate, or an anonymous client."""

import hmac
from base64 import b64encode

import pytest

from martlet.access.signers import SLICE_BYTES
from martlet.contracts import ANONYMOUS, AccessKey, Credentials, Identity, LoginOrigin, Nobody, SignedRequest
from martlet.contracts import SigningSecret as Secret
from martlet.errors import Reason, Refused
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import TOKEN, SigningKey, signed_values

from .conftest import Harness
from .nameserver_talk import REGISTRATION, NameServerClient, open_nameserver, registration_body

ROUTE, KV = RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.PUT_KV_CONFIG
TEXT: dict[str, object] = {"namespace": "n", "key": "k", "value": "w"}
ANN = SigningKey("ann", "ann's secret")
BOB = SigningKey("bob", "bob's secret")
MALLORY = SigningKey("ann", "a guess")


class Users:
    """An authenticator with secrets, and rules: ann may do everything, others may get the topic T."""

    def __init__(self) -> None:
        self.secrets = {"ann": "ann's secret", "bob": "bob's secret"}
        self.asked: list[tuple[type, str]] = []
        self.lets_anybody_in = True

    def authenticate(self, credentials: Credentials, origin: LoginOrigin) -> Identity | Secret | None:
        self.asked.append((type(credentials), origin.protocol))
        if isinstance(credentials, AccessKey):
            name = credentials.access_key
            return Secret(Identity(name), self.secrets.get(name, "random").encode())
        if isinstance(credentials, Nobody) and not self.lets_anybody_in:
            raise Refused(Reason.CREDENTIALS, "a name is missing")
        return None

    def authorize(self, identity: Identity, action: str, name: str) -> bool | None:
        return True if identity.name == "ann" or (action == "read" and name == "T") else None


@pytest.fixture
def users(harness: Harness) -> Users:
    users = Users()
    harness.broker.authentication.authenticators = (users.authenticate,)
    harness.broker.authorizers = (users.authorize,)
    return users


async def test_each_request_acts_for_its_signer(harness: Harness, users: Users) -> None:
    server = await open_nameserver(harness.broker, "T", "U")
    client = NameServerClient(server, harness.broker)
    users.asked.clear()
    for key, code in (ANN, 0), (BOB, ResponseCode.TOPIC_NOT_EXIST), (ANN, 0):
        assert (await client.ask(ROUTE, key.sign(ROUTE, {"topic": "U"}, b""))).code == code
        assert (await client.ask(ROUTE, key.sign(ROUTE, {"topic": "T"}, b""))).code == 0
    assert (await client.ask(ROUTE, {"topic": "U"})).code == ResponseCode.TOPIC_NOT_EXIST
    assert (await client.ask(KV, BOB.sign(KV, TEXT, b""))).code == ResponseCode.NO_PERMISSION
    assert (await client.ask(KV, ANN.sign(KV, TEXT, b""))).code == 0
    assert server.kv.get("n", "k") == "w"
    assert users.asked == [(AccessKey, "nameserver"), (AccessKey, "nameserver"), (Nobody, "nameserver")]


@pytest.mark.parametrize("change", ["secret", "user", "field", "body", "no signature"])
@pytest.mark.parametrize("code", [ROUTE, KV, RequestCode.REGISTER_BROKER, RequestCode.BROKER_HEARTBEAT, 9999])
async def test_a_wrong_signature_is_refused_and_nothing_happens(
    harness: Harness, users: Users, code: int, change: str
) -> None:
    server = await open_nameserver(harness.broker, "T", "U")
    client = NameServerClient(server, harness.broker)
    body = registration_body("T", "X")
    key = {"secret": MALLORY, "user": SigningKey("nobody", "x")}.get(change, ANN)
    ext = key.sign(code, {**REGISTRATION, **TEXT, "topic": "T"}, body)
    if change == "field":
        ext["topic"] = "U"
    elif change == "body":
        body += b" "
    elif change == "no signature":
        del ext["Signature"]
    answer = await client.ask(code, ext, body)
    assert answer.code == ResponseCode.NO_PERMISSION
    assert answer.remark == f"access key {key.access_key!r} or the signature is wrong"
    assert server.kv.get("n", "k") == "v"
    assert server.table.route("X") is None


async def test_a_changed_secret_counts_from_the_next_request_on(harness: Harness, users: Users) -> None:
    server = await open_nameserver(harness.broker, "T", "U")
    client = NameServerClient(server, harness.broker)
    fields = ANN.sign(ROUTE, {"topic": "U"}, b"")
    assert (await client.ask(ROUTE, fields)).code == 0
    users.secrets["ann"] = "another"
    harness.broker.authentication.changed()
    assert (await client.ask(ROUTE, fields)).code == ResponseCode.NO_PERMISSION
    assert (await client.ask(ROUTE, SigningKey("ann", "another").sign(ROUTE, {"topic": "U"}, b""))).code == 0


async def test_a_long_registration_is_verified_in_slices(harness: Harness, users: Users) -> None:
    server = await open_nameserver(harness.broker, "T", "U")
    client = NameServerClient(server, harness.broker)
    names = [f"{number}{'x' * 500}" for number in range(5 * SLICE_BYTES // 1000)]
    body = registration_body(*names)
    assert len(body) > 4 * SLICE_BYTES
    code, slices = RequestCode.REGISTER_BROKER, server.turns.slices
    assert (await client.ask(code, MALLORY.sign(code, REGISTRATION, body), body)).code == ResponseCode.NO_PERMISSION
    assert server.turns.slices > slices + 3
    assert server.table.route(names[-1]) is None
    assert (await client.ask(code, ANN.sign(code, REGISTRATION, body), body)).code == 0
    assert server.table.route(names[-1]) is not None


async def test_the_owner_of_a_certificate_needs_no_signature(harness: Harness, users: Users) -> None:
    server = await open_nameserver(harness.broker, "T", "U")
    client = NameServerClient(server, harness.broker)
    client.peer.identity = Identity("ann")
    assert (await client.ask(ROUTE, {"topic": "U"})).code == 0
    # A signature counts more.
    assert (await client.ask(ROUTE, BOB.sign(ROUTE, {"topic": "U"}, b""))).code == ResponseCode.TOPIC_NOT_EXIST


async def test_where_nobody_is_let_in_every_unsigned_request_is_refused(harness: Harness, users: Users) -> None:
    server = await open_nameserver(harness.broker, "T", "U")
    users.lets_anybody_in = False
    client = NameServerClient(server, harness.broker)
    for topic in "T", "X":
        answer = await client.ask(ROUTE, {"topic": topic})
        assert (answer.code, answer.remark) == (ResponseCode.NO_PERMISSION, "a name is missing")
    assert (await client.ask(KV, TEXT)).code == ResponseCode.NO_PERMISSION
    assert (await client.ask(ROUTE, BOB.sign(ROUTE, {"topic": "T"}, b""))).code == 0


async def test_authenticators_may_verify_signatures_themselves_and_tokens_of_go_clients(harness: Harness) -> None:
    def verify(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
        if not isinstance(credentials, SignedRequest):
            return None
        mac = hmac.digest(b"bob's secret", credentials.content, "sha1")
        if not hmac.compare_digest(b64encode(mac).decode(), credentials.signature):
            raise Refused(Reason.CREDENTIALS, "it is wrong")
        return Identity(credentials.access_key)

    server = await open_nameserver(harness.broker, "T", "U")
    harness.broker.authentication.authenticators = (verify,)
    harness.broker.authorizers = (lambda identity, action, name: identity.name == "bob",)
    client = NameServerClient(server, harness.broker)
    assert (await client.ask(ROUTE, BOB.sign(ROUTE, {"topic": "T"}, b""))).code == 0
    fields = {"topic": "T", "AccessKey": "bob", TOKEN: "session"}
    mac = hmac.digest(b"bob's secret", signed_values(fields, Command(ROUTE).version, TOKEN), "sha1")
    assert (await client.ask(ROUTE, {**fields, "Signature": b64encode(mac).decode()})).code == 0
    assert (await client.ask(ROUTE, {**fields, "Signature": ""})).code == ResponseCode.NO_PERMISSION


async def test_without_authenticators_signatures_are_not_looked_at(harness: Harness) -> None:
    server = await open_nameserver(harness.broker, "T", "U")
    client = NameServerClient(server, harness.broker)
    assert (await client.ask(ROUTE, MALLORY.sign(ROUTE, {"topic": "T"}, b""))).code == 0
    assert client.peer.identity == ANONYMOUS
