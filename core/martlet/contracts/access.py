"""The types of authenticators, mechanisms and authorizers."""

from collections.abc import Callable, Collection
from ipaddress import IPv4Network, IPv6Network
from typing import Final, Literal, Protocol, TypeAlias

from msgspec import Struct

__all__ = [
    "ANONYMOUS",
    "NO_ORIGIN",
    "AccessEvent",
    "AccessKey",
    "Action",
    "Authenticator",
    "Authorizer",
    "Certificate",
    "Challenge",
    "Credentials",
    "Decider",
    "Exchange",
    "Identity",
    "LoginEvent",
    "LoginOrigin",
    "Mechanism",
    "Network",
    "Nobody",
    "Password",
    "PasswordCheck",
    "Proved",
    "Question",
    "ResourceKind",
    "SignedRequest",
    "SigningSecret",
    "Verdict",
]


class Identity(Struct, frozen=True, gc=False):
    """The identity that a client has proved; ``name`` is empty for an anonymous client.

    Args:
      groups: groups of users that the proof names, such as the claim of a token.
      expires_ms: the end of the proof, in epoch milliseconds; 0 for none.
    """

    name: str = ""
    groups: tuple[str, ...] = ()
    expires_ms: int = 0


ANONYMOUS: Final = Identity()


class Password(Struct, frozen=True):
    """A user name and a password, as a client sent them."""

    user: str
    password: bytes

    def __repr__(self) -> str:
        return f"Password(user={self.user!r})"


class SignedRequest(Struct, frozen=True):
    """One request signed with a secret key, as RocketMQ's AclClientRPCHook does.

    Authenticators get it if none of them answers its `AccessKey`, which is many times faster.

    ``signature`` is base64 of HMAC-SHA1 over ``content``: the values of all header fields but Signature in the order
    of their names, and the body. Go clients leave the field of ``token`` out of what they sign, so if there is a token,
    ``without_token`` is their content. An authenticator that refuses is asked again with that as ``content``.
    """

    access_key: str
    signature: str
    content: bytes
    token: str = ""
    without_token: bytes = b""

    def __repr__(self) -> str:
        return f"SignedRequest(access_key={self.access_key!r})"


class AccessKey(Struct, frozen=True):
    """The name of the key that signed one or more requests; it proves nothing without the `SigningSecret`."""

    access_key: str
    token: str = ""

    def __repr__(self) -> str:
        return f"AccessKey(access_key={self.access_key!r})"


class SigningSecret(Struct, frozen=True):
    """An answer to an `AccessKey`: the core verifies the signatures, base64 of HMAC-SHA1 as in `SignedRequest`.

    A connection keeps *secret* until `Authentication.changed` is called.

    Args:
      identity: the identity that a right signature proves.
      secret: the key of the HMAC; not empty.

    Raises:
      ValueError: *secret* is empty.
    """

    identity: Identity
    secret: bytes

    def __post_init__(self) -> None:
        if not self.secret:
            raise ValueError(f"secret of {self.identity.name!r} is empty; answer a random one for an unknown key")

    def __repr__(self) -> str:
        return f"SigningSecret(identity={self.identity!r})"


class Certificate(Struct, frozen=True):
    """A client certificate that TLS has verified: its subject's common name, its DNS names, and its DER bytes."""

    common_name: str
    dns_names: tuple[str, ...]
    der: bytes

    def __repr__(self) -> str:
        return f"Certificate(common_name={self.common_name!r}, dns_names={self.dns_names!r})"


class Nobody(Struct, frozen=True):
    """No credentials: the client wants to be anonymous."""


class LoginOrigin(Struct, frozen=True):
    """The place that credentials come from.

    Args:
      address: the IP address, without the port.
      protocol: the name of the port, such as ``mqtt`` or ``remoting``.
      listener: the ``host:port`` that the client connected to, as configured.
      client_id: the client's name for itself, which proves nothing; empty if the protocol has none at this point.
    """

    address: str = ""
    protocol: str = ""
    listener: str = ""
    client_id: str = ""


NO_ORIGIN: Final = LoginOrigin()  # of what the broker does by itself


class PasswordCheck(Struct, frozen=True):
    """An answer to a `Password` that takes a slow hash.

    Args:
      identity: the identity that the right password proves.
      verifier: the stored hash. A password that it accepted before is accepted for an hour without *check*.
      check: called in a worker thread; raises `Refused` (Reason.CREDENTIALS) if the password is wrong.
    """

    identity: Identity
    verifier: bytes
    check: Callable[[], object]

    def __repr__(self) -> str:
        return f"PasswordCheck(identity={self.identity!r})"


Credentials: TypeAlias = Password | AccessKey | SignedRequest | Certificate | Nobody
# Returns the identity that the credentials prove, or None to leave them to the next authenticator; raises `Refused`
# (Reason.CREDENTIALS) when they are wrong. Compare secrets in constant time (hmac.compare_digest), also for a user who
# does not exist. Called on the event loop: answer a `Password` with a `PasswordCheck` if it takes over a millisecond.
# Answer an `AccessKey` with a `SigningSecret`, or None.
Authenticator: TypeAlias = Callable[[Credentials, LoginOrigin], Identity | PasswordCheck | SigningSecret | None]


class Challenge(Struct, frozen=True):
    """A step of an `Exchange`: the client has to answer *data*."""

    data: bytes

    def __repr__(self) -> str:
        return "Challenge()"


class Proved(Struct, frozen=True):
    """The end of an `Exchange`: the client's identity, and *data* for the client, with which the broker may prove
    itself.
    """

    identity: Identity
    data: bytes = b""

    def __repr__(self) -> str:
        return f"Proved(identity={self.identity!r})"


# One authentication in several steps: called with the client's data, in a worker thread and never twice at once. Raises
# `Refused` (Reason.CREDENTIALS) if the client proves nothing; it is not called again after that.
Exchange: TypeAlias = Callable[[bytes], Challenge | Proved]
# Begins an exchange for one client.
Mechanism: TypeAlias = Callable[[], Exchange]


# RocketMQ's actions (auth Action, 5.5.0).
Action: TypeAlias = Literal["publish", "subscribe", "create", "update", "delete", "get", "list"]
ResourceKind: TypeAlias = Literal["topic", "name", "group", "shared", "cluster"]
Network: TypeAlias = IPv4Network | IPv6Network


class Question(Struct, frozen=True, gc=False):
    """May *identity* do *action* on a resource?

    Args:
      kind: the kind of the resource.
      name: a topic; ``topic/name`` or ``topic/filter`` of kind ``name``; a consumer group; ``scope/group`` of a shared
        group, or empty for all of them; empty for the cluster.
      address: the IP address of a client, without the port; empty for the broker itself. The answer holds for all
        addresses that are in the same `Decider.networks`.
    """

    identity: Identity
    action: Action
    kind: ResourceKind
    name: str
    address: str = ""


class Verdict(Struct, frozen=True, gc=False):
    """The answer to a `Question`.

    Args:
      rule: the rule that decided, for the audit trail and for administrators.
      reason: why it is refused, for the client.
      observed: allowed only because the authorizer observes its rules instead of enforcing them.
    """

    allowed: bool
    rule: str = ""
    reason: str = ""
    observed: bool = False


class AccessEvent(Struct, frozen=True):
    """For an audit trail: a refusal, one that is only observed, or a permitted ``create``, ``update`` or ``delete``.

    *protocol* is the name of the port.
    """

    question: Question
    verdict: Verdict
    protocol: str


class LoginEvent(Struct, frozen=True):
    """For an audit trail: a login, or one that was refused.

    Args:
      user: the name that the client gave: of a user, an access key or a certificate; empty for an anonymous client.
      method: ``password``, ``signature``, ``certificate``, ``mechanism`` or ``none``.
      identity: what was proved; None after a refusal.
      reason: of the refusal, for administrators.
    """

    origin: LoginOrigin
    user: str
    method: str
    identity: Identity | None
    reason: str = ""


class Decider(Protocol):
    """An authorizer that sees the whole question. `Rules.changed` must be called after a change of its rules."""

    @property
    def networks(self) -> Collection[Network]:
        """The networks that rules name; changes only together with the rules."""
        ...

    def decide(self, question: Question) -> Verdict | None:
        """Return the verdict; None leaves the decision to the next authorizer."""
        ...


# A function is called with (identity, action, name). Its actions are ``publish``, ``read`` (subscribe, get, list) and
# ``manage`` (create, update, delete); a consumer group has the name of its retry topic, a shared group is
# ``$share/scope/group``, and the cluster has the empty name. True allows, False denies, None leaves the decision to the
# next authorizer.
Authorizer: TypeAlias = Callable[[Identity, str, str], bool | None] | Decider
