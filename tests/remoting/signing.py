"""A broker that knows ann and bob, and requests signed as RocketMQ's AclClientRPCHook signs them.

The expected bytes follow RocketMQ 4.9.8 acl/src/main/java/org/apache/rocketmq/acl/common/AclUtils.java
combineRequestContent and AclSigner.java: HMAC-SHA1 over the values of a TreeMap of the header fields and the body.
"""

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Mapping

from martlet.contracts import AccessKey, Authenticator, Credentials, Identity, LoginOrigin, SignedRequest, SigningSecret
from martlet.errors import Reason, Refused

from .conftest import FakeClient, Harness

SECRETS = {"ann": b"ann's key", "bob": b"bob's key"}


def sign(user: str, ext: Mapping[str, object], body: bytes = b"", secret: bytes | None = None) -> dict[str, object]:
    fields = {**ext, "AccessKey": user}
    content = "".join(str(fields[name]) for name in sorted(fields)).encode() + body
    mac = hmac.new(SECRETS[user] if secret is None else secret, content, hashlib.sha1)
    return {**fields, "Signature": b64encode(mac.digest()).decode()}


def tell(credentials: Credentials, origin: LoginOrigin) -> SigningSecret | None:
    """Leaves the verifying to the core."""
    if not isinstance(credentials, AccessKey):
        return None
    user = credentials.access_key
    return SigningSecret(Identity(user), SECRETS.get(user, b"of nobody"))


def check(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
    """Verifies each request itself."""
    if not isinstance(credentials, SignedRequest):
        return None
    mac = hmac.digest(SECRETS.get(credentials.access_key, b"?"), credentials.content, "sha1")
    if not hmac.compare_digest(b64encode(mac).decode(), credentials.signature):
        raise Refused(Reason.CREDENTIALS, f"signature of {credentials.access_key!r} is wrong")
    return Identity(credentials.access_key)


def allow(identity: Identity, action: str, name: str) -> bool:
    return identity.name == "ann" or (identity.name == "bob" and action == "read")


def closed(harness: Harness, authenticator: Authenticator) -> FakeClient:
    """A client of a broker that knows ann and bob."""
    harness.topic("T")
    harness.broker.authentication.authenticators = (authenticator,)
    harness.broker.authorizers = (allow,)
    return harness.client()


def sign_with_token(user: str, ext: Mapping[str, object], token: str, *, signed: bool) -> dict[str, object]:
    """As Java clients sign if the token is *signed*, otherwise as Go clients do."""
    fields = {**ext, "SecurityToken": token} if signed else ext
    return {**sign(user, fields, b"x"), "SecurityToken": token}
