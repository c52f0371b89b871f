"""RabbitMQ's exported definitions (``rabbitmqctl export_definitions``): users, their limits, and their permissions.

Queues and exchanges are topics here, so permissions for both become rules about topics: ``write`` to publish, ``read``
to subscribe, ``configure`` to create, update and delete. Who may write to the exchange ``amq.default`` may send to each
queue; that becomes a rule for the queues that the user may also declare. Topics of MQTT are names here, and take
permissions for the exchange ``amq.topic``. What STOMP's clients send to ``/topic/KEY`` takes permissions for the same
exchange there, but for a topic here that is a queue as well, so it gets none.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Collection
from typing import Final, final

import msgspec
from msgspec import Struct

from martlet.contracts import RuleLevel
from martlet_acl.imports.findings import Findings, Imported, ImportedUser
from martlet_acl.imports.name_expressions import NamePatterns, is_found_in, parse_expression
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.rules import ACTIONS, ALLOW, DENY, StoredRule
from martlet_acl.policy.subjects import user_subject

__all__ = ["read_definitions"]

BYTES_MAX: Final = 64 << 20
SHA2: Final = {"rabbit_password_hashing_sha256": ("sha256", 32), "rabbit_password_hashing_sha512": ("sha512", 64)}
SALT_BYTES: Final = 4
USER_NAME: Final = "{username}"
DEFAULT_EXCHANGE, TOPIC_EXCHANGE = "amq.default", "amq.topic"
CONNECTIONS, CHANNELS = "max-connections", "max-channels"  # limits of a user; below 0 for none
# As STOMP's destinations encode their names (docs/stomp.md).
_UNFIT: Final = re.compile(r"[^%|\w-]", re.ASCII)
_SPECIAL: Final = re.compile(r"[*+#{}]")

WEAK: Final = "RabbitMQ's hashes of passwords are weak, one round of SHA-2: let users set their passwords anew"
NO_TOPICS: Final = (
    "permissions for amq.topic become rules for names of MQTT; clients of STOMP need rules for /topic/KEY, which is "
    "the topic KEY and also the queue, and for /exchange/NAME/KEY, which is the topic NAME%2FKEY"
)


@final
class _User(Struct, frozen=True):
    name: str
    password_hash: str = ""
    hashing_algorithm: str = ""
    tags: str | list[str] = ""
    limits: dict[str, int] | list[int] = {}  # an empty object of Erlang may be written as a list


@final
class _Permission(Struct, frozen=True):
    user: str
    vhost: str
    configure: str
    write: str
    read: str


@final
class _TopicPermission(Struct, frozen=True):
    user: str
    vhost: str
    exchange: str
    write: str
    read: str


@final
class _Definitions(Struct, frozen=True):
    users: list[_User] = []
    permissions: list[_Permission] = []
    topic_permissions: list[_TopicPermission] = []


def read_definitions(source: bytes, vhost: str = "/", topic: str = "mqtt") -> Imported:
    """Return the users of all virtual hosts, and the rules of *vhost*; names of MQTT are in *topic*.

    Raises:
      PolicyError: it is no JSON, or has another form.
    """
    if len(source) > BYTES_MAX:
        raise PolicyError(f"it has {len(source)} bytes; {BYTES_MAX} are allowed")
    try:
        definitions = msgspec.json.decode(source, type=_Definitions)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyError(f"it is no file of definitions; {error}") from error
    found = Findings()
    for user in definitions.users:
        _add_user(found, user)
    if any(user.password for user in found.users.values()):
        found.note_once(WEAK)
    keys = {}
    for number, each in enumerate(definitions.topic_permissions, 1):
        if each.vhost == vhost and each.exchange == TOPIC_EXCHANGE:
            keys[each.user] = each
        else:
            found.remark(f"topic permission {number}", _elsewhere(each.user, each.vhost, vhost, each.exchange))
    for number, permission in enumerate(definitions.permissions, 1):
        place = f"permission {number}"
        if permission.vhost == vhost:
            _add_rights(found, place, permission, keys.get(permission.user), topic)
        else:
            found.remark(place, _elsewhere(permission.user, permission.vhost, vhost))
    return found.finish()


def _elsewhere(user: str, vhost: str, wanted: str, exchange: str = "") -> str:
    if vhost != wanted:
        return f"user {user!r} has it in the virtual host {vhost!r}; there are none here, so it is not imported"
    return f"user {user!r} has it for the exchange {exchange!r}; only {TOPIC_EXCHANGE} has names here"


def _add_user(found: Findings, user: _User) -> None:
    place = f"user {user.name!r}"
    try:
        password = _verifier(user)
    except PolicyError as error:
        found.remark(place, f"{error}; set the password anew")
        password = ""
    limits = user.limits if isinstance(user.limits, dict) else {}
    connections = limits.get(CONNECTIONS, -1)
    if connections == 0:
        found.remark(place, f"{CONNECTIONS} is 0, so the user may not connect; the password is not imported")
        password = ""
    if limits.get(CHANNELS, -1) >= 0:
        found.remark(place, f"{CHANNELS} {limits[CHANNELS]} is not imported; there are no channels here")
    tags = user.tags.split(",") if isinstance(user.tags, str) else user.tags
    if "administrator" in tags:
        found.remark(place, "the tag administrator is not imported; here an administrator may do everything")
    found.add_user(place, ImportedUser(user.name, password=password, connections=max(connections, 0)))


def _verifier(user: _User) -> str:
    """Return the verifier of the user's password; empty for none. Raises `PolicyError`."""
    if not user.password_hash:
        return ""
    function, size = SHA2.get(user.hashing_algorithm, ("", 0))
    if not function:
        raise PolicyError(f"the hash {user.hashing_algorithm or 'without a name'!r} of the password is unknown")
    try:
        data = b64decode(user.password_hash, validate=True)
    except ValueError as error:
        raise PolicyError("the hash of the password is no base64") from error
    if len(data) != SALT_BYTES + size:
        raise PolicyError(f"the hash of the password has {len(data)} bytes, not {SALT_BYTES + size}")
    salt, digest = (b64encode(each).decode().rstrip("=") for each in (data[:SALT_BYTES], data[SALT_BYTES:]))
    return f"$salted$h={function},at=begin${salt}${digest}"


# rules


@final
class _Rights:
    """What one user may do, by resource."""

    def __init__(self, found: Findings, place: str, topic: str) -> None:
        self._found = found
        self._place = place
        self._topic = topic
        self._allowed: dict[str, set[str]] = {}
        self._denied: dict[tuple[RuleLevel, str], set[str]] = {}

    def parse(self, name: str, expression: str) -> NamePatterns:
        """Return the names of the permission *name*; none if they cannot be said."""
        place = f"{self._place}, {name} {expression!r:.80}"
        try:
            patterns = parse_expression(expression)
        except PolicyError as error:
            self._found.remark(place, f"{error}; it is not imported")
            return NamePatterns()
        for remark in patterns.remarks:
            self._found.remark(place, remark)
        return patterns

    def allow(self, resource: str, *actions: str) -> None:
        self._allowed.setdefault(resource, set()).update(actions)

    def allow_topics(self, patterns: NamePatterns, *actions: str) -> None:
        """Allow *actions* on topics with these names."""
        for name in map(_encoded, patterns.names):
            if name == self._topic:
                self._found.remark(self._place, f"the topic {name!r} has the names of MQTT; no rule is about it alone")
            elif name not in map(_encoded, (DEFAULT_EXCHANGE, TOPIC_EXCHANGE)):
                self.allow(f"topic:{name}", *actions)
        for beginning in patterns.beginnings:
            self.allow(f"topic:{_encoded(beginning)}*", *actions)

    def allow_names(self, topics: NamePatterns, names: list[str], action: str) -> None:
        """Allow *action* on the names of MQTT in *names*, and on no others, although *topics* may have their topic."""
        for name in names:
            self.allow(f"name:{self._topic}/{name}", action)
        if "#" not in names and any(self._topic.startswith(_encoded(each)) for each in topics.beginnings):
            level: RuleLevel = "default" if names else "custom"
            resource = f"name:{self._topic}/#" if names else f"topic:{self._topic}"
            self._denied.setdefault((level, resource), set()).add(action)

    def names_of(self, place: str, patterns: NamePatterns, vhost: str) -> list[str]:
        """Return routing keys as names and filters of MQTT."""
        texts = [(name, "") for name in patterns.names]
        texts += [(name, "*" if name else "#") for name in patterns.beginnings]
        found = []
        for key, end in texts:
            name = key.replace("{vhost}", vhost).replace(".", "/")
            if _SPECIAL.search(name.replace(USER_NAME, "")) or not (name or end):
                self._found.remark(f"{self._place}, {place}", f"keys like {key!r:.80} cannot be said in rules")
            else:
                found.append(name.replace(USER_NAME, "{user}") + end)
        return found

    def finish(self, subject: str) -> None:
        for resource, actions in self._allowed.items():
            self._put(subject, "custom", StoredRule(resource, _in_order(actions), ALLOW))
        for (level, resource), actions in self._denied.items():
            self._put(subject, level, StoredRule(resource, _in_order(actions), DENY))

    def _put(self, subject: str, level: RuleLevel, rule: StoredRule) -> None:
        self._found.put_rule(self._place, subject, level, rule)


def _add_rights(
    found: Findings, place: str, permission: _Permission, keys: _TopicPermission | None, topic: str
) -> None:
    rights = _Rights(found, place, topic)
    configured = rights.parse("configure", permission.configure)
    rights.allow_topics(configured, "create", "update", "delete")
    if is_found_in(permission.write, DEFAULT_EXCHANGE):
        rights.allow_topics(configured, "publish")
    for name, action in (("write", "publish"), ("read", "subscribe")):
        expression = permission.write if name == "write" else permission.read
        patterns = rights.parse(name, expression)
        rights.allow_topics(patterns, action)
        names: list[str] = []
        if is_found_in(expression, TOPIC_EXCHANGE):
            found.note_once(NO_TOPICS)
            key = ".*" if keys is None else keys.write if name == "write" else keys.read
            names = rights.names_of(f"topic {name}", rights.parse(f"topic {name}", key), permission.vhost)
        if name == "write" and is_found_in(expression, DEFAULT_EXCHANGE):
            patterns = NamePatterns((), (*patterns.beginnings, *configured.beginnings))
        rights.allow_names(patterns, names, action)
        if action == "subscribe" and not patterns.is_empty:
            rights.allow("shared:stomp/queue", action)
            rights.allow("shared:stomp/topic/*", action)
        if action == "subscribe" and names:
            rights.allow("shared:mqtt/*", action)
    rights.finish(user_subject(permission.user))


def _in_order(actions: Collection[str]) -> tuple[str, ...]:
    return tuple(action for action in ACTIONS if action in actions)


def _encoded(name: str) -> str:
    return _UNFIT.sub(lambda unfit: "".join(f"%{byte:02X}" for byte in unfit[0].encode()), name)
