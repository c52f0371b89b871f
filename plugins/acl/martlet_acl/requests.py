"""Requests of the owner of the data directory: each is a line of JSON on the socket of a broker."""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from martlet.contracts import RuleLevel
from martlet.errors import Reason, Refused
from martlet_acl.imports.findings import ImportedRule, ImportedUser

__all__ = [
    "AclAnswer",
    "AddImported",
    "AddUser",
    "ExplainRequest",
    "ListGroups",
    "ListKeys",
    "ListQuotas",
    "ListRules",
    "ListUsers",
    "Observe",
    "Place",
    "PutGroup",
    "PutKey",
    "PutRule",
    "RemoveGroup",
    "RemoveKey",
    "RemoveQuota",
    "RemoveRule",
    "RemoveUser",
    "Report",
    "Request",
    "SetQuota",
    "SetUser",
    "SwitchKey",
    "decode_request",
]

# Where the next page of a list begins: the number of an entry, and of a row inside it; None after the last page.
_Number: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]
Place: TypeAlias = tuple[_Number, _Number] | None


class AclAnswer(Struct, omit_defaults=True):
    """The answer to a request: *rows* and the *place* of the next page, or an *error* with its *reason*."""

    rows: list[dict[str, object]] = []
    place: Place = None
    error: str = ""
    reason: str = ""


class _Request(Struct, frozen=True, tag_field="request", forbid_unknown_fields=True):
    pass


class AddUser(_Request, frozen=True, tag="add user"):
    name: str
    administrator: bool = False
    groups: tuple[str, ...] = ()
    password: str | None = None

    def __repr__(self) -> str:
        return f"AddUser(name={self.name!r})"


class SetUser(_Request, frozen=True, tag="set user"):
    """None leaves something as it is; an empty *password* removes it."""

    name: str
    administrator: bool | None = None
    disabled: bool | None = None
    join: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    password: str | None = None

    def __repr__(self) -> str:
        return f"SetUser(name={self.name!r})"


class RemoveUser(_Request, frozen=True, tag="remove user"):
    name: str


class ListUsers(_Request, frozen=True, tag="list users"):
    place: Place = None


class PutKey(_Request, frozen=True, tag="put key"):
    user: str
    key: str
    secret: str

    def __repr__(self) -> str:
        return f"PutKey(user={self.user!r}, key={self.key!r})"


class SwitchKey(_Request, frozen=True, tag="switch key"):
    key: str
    disabled: bool


class RemoveKey(_Request, frozen=True, tag="remove key"):
    key: str


class ListKeys(_Request, frozen=True, tag="list keys"):
    user: str = ""
    place: Place = None


class PutGroup(_Request, frozen=True, tag="put group"):
    name: str
    groups: tuple[str, ...] = ()


class RemoveGroup(_Request, frozen=True, tag="remove group"):
    name: str


class ListGroups(_Request, frozen=True, tag="list groups"):
    place: Place = None


class PutRule(_Request, frozen=True, tag="put rule"):
    subject: str
    decision: Literal["allow", "deny"]
    actions: tuple[str, ...]
    resource: str
    networks: tuple[str, ...] = ()
    level: RuleLevel = "custom"


class RemoveRule(_Request, frozen=True, tag="remove rule"):
    subject: str
    resource: str
    level: RuleLevel = "custom"


class ListRules(_Request, frozen=True, tag="list rules"):
    subject: str = ""
    place: Place = None


class SetQuota(_Request, frozen=True, tag="set quota"):
    """Other limits than *limits*, which are by name, stay as they are."""

    subject: str
    limits: dict[str, int | bool] = {}


class RemoveQuota(_Request, frozen=True, tag="remove quota"):
    subject: str


class ListQuotas(_Request, frozen=True, tag="list quotas"):
    subject: str = ""
    place: Place = None


class ExplainRequest(_Request, frozen=True, tag="explain"):
    user: str
    action: str
    resource: str
    address: str = ""


class AddImported(_Request, frozen=True, tag="add imported"):
    """What exists already stays as it is; the answer has a row for each such user and rule."""

    users: tuple[ImportedUser, ...] = ()
    rules: tuple[ImportedRule, ...] = ()


class Observe(_Request, frozen=True, tag="observe"):
    observe: bool


class Report(_Request, frozen=True, tag="report"):
    place: Place = None


Request: TypeAlias = (
    AddImported
    | AddUser
    | SetUser
    | RemoveUser
    | ListUsers
    | PutKey
    | SwitchKey
    | RemoveKey
    | ListKeys
    | PutGroup
    | RemoveGroup
    | ListGroups
    | PutRule
    | RemoveRule
    | ListRules
    | SetQuota
    | RemoveQuota
    | ListQuotas
    | ExplainRequest
    | Observe
    | Report
)

DECODER: Final = msgspec.json.Decoder[Request](Request)


def decode_request(data: bytes) -> Request:
    """Return the request that the line *data* is.

    Raises:
      Refused: it is none (Reason.MALFORMED).
    """
    try:
        return DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(Reason.MALFORMED, f"request is invalid; {error}") from None  # a cause may show a secret
