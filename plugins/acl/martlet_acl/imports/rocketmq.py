"""Accounts of RocketMQ's ACL 1.0: ``plain_acl.yml`` and the files in ``conf/acl`` (PlainPermissionManager 4.9.8).

An account is a user with an access key. The permission for a topic replaces the default one as a whole, so it becomes
a custom rule and, for what it leaves out, a rule of the default policy that denies it.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from martlet.contracts import RuleLevel
from martlet_acl.imports.findings import Findings, Imported, ImportedUser
from martlet_acl.imports.yaml_nodes import YamlNode, parse_yaml
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.rules import ALL, ALLOW, DENY, StoredRule
from martlet_acl.policy.subjects import user_subject

__all__ = ["read_plain_acl"]

BOTH: Final = ("publish", "subscribe")
PERMISSIONS: Final[Mapping[frozenset[str], tuple[str, ...]]] = {
    frozenset(("PUB",)): ("publish",),
    frozenset(("SUB",)): ("subscribe",),
    frozenset(("PUB", "SUB")): BOTH,
    frozenset(("DENY",)): (),
}
LISTS: Final = {"topicPerms": "topic", "groupPerms": "group"}
DEFAULTS: Final = {"defaultTopicPerm": "topic", "defaultGroupPerm": "group"}
TRUE: Final = frozenset(("true", "yes", "on"))
# What a topic or a group can be called in RocketMQ. Other names fit nothing there.
NAME: Final = re.compile(r"[%|\w-]+", re.ASCII)

NO_TRACES: Final = (
    "RocketMQ lets every account publish to RMQ_SYS_TRACE_TOPIC; if clients trace messages, allow everybody to "
    "publish on topic:RMQ_SYS_TRACE_TOPIC"
)
NO_QUERIES: Final = (
    "RocketMQ checks only sends, pulls, heartbeats and offsets of accounts; here each request is checked, so tools "
    "need rules such as get, list on cluster"
)


def read_plain_acl(source: str, known: Collection[str] = ()) -> Imported:
    """Return the accounts of a file; those whose keys are *known*, because another file has them, do not count.

    An account with an error is not imported: without one of its permissions the user might do more.

    Raises:
      PolicyError: it is no YAML, or has another form.
    """
    found = Findings()
    for name, value in parse_yaml(source).fields():
        if name == "globalWhiteRemoteAddresses":
            for address in value.items():
                _remark_address(found, address)
        elif name == "accounts":
            for account in value.items():
                _read_account(found, account, known)
        elif name != "dataVersion":
            found.remark(value.place, f"{name!r} is unknown")
    if any(not user.administrator for user in found.users.values()):
        found.remark("", NO_TRACES)
        found.remark("", NO_QUERIES)
    return found.finish()


def _remark_address(found: Findings, address: YamlNode) -> None:
    if written := address.text().strip():
        text = f"requests from {written!r} need no signature in RocketMQ; here each must be signed"
        found.remark(address.place, f"{text}. Rules may name networks")


def _read_account(found: Findings, account: YamlNode, known: Collection[str]) -> None:
    fields = dict(account.fields())
    key, secret = (fields.pop(name).text().strip() if name in fields else "" for name in ("accessKey", "secretKey"))
    if not key or not secret:
        found.remark(account.place, "the account has no accessKey or no secretKey; it is not imported")
        return
    if key in known:
        found.remark(account.place, f"account {key!r} is in another file already, which counts")
        return
    is_admin = "admin" in fields and fields.pop("admin").text().strip().lower() in TRUE
    rules: list[tuple[str, RuleLevel, StoredRule]] = []
    try:
        for name, value in fields.items():
            if name in LISTS:
                for item in value.items():
                    rules += ((item.place, *each) for each in _rules_of(found, item, LISTS[name]))
            elif name in DEFAULTS:
                rules += ((value.place, "default", each) for each in _default_rule(found, value, DEFAULTS[name]))
            elif name == "whiteRemoteAddress":
                _remark_address(found, value)
            else:
                found.remark(value.place, f"{name!r} of account {key!r} is unknown")
    except PolicyError as error:
        found.remark("", f"{error}; account {key!r} is not imported")
        return
    if found.add_user(account.place, ImportedUser(key, administrator=is_admin, secret=secret)):
        for place, level, rule in rules:
            found.put_rule(place, user_subject(key), level, rule)


def _rules_of(found: Findings, item: YamlNode, kind: str) -> Iterator[tuple[RuleLevel, StoredRule]]:
    """Yield the rules of an item such as ``topicA=PUB``."""
    name, equals, words = (part.strip() for part in item.text().partition("="))
    if not equals:
        raise PolicyError(f"{item.text()!r:.80} is no permission; write {kind}=PUB, SUB, PUB|SUB or DENY", item.place)
    if not NAME.fullmatch(name):
        found.remark(item.place, f"no {kind} has the name {name!r:.80}")
        return
    actions, resource = _actions_of(found, item, words), f"{kind}:{name}"
    if not actions:
        yield "custom", StoredRule(resource, (ALL,), DENY)
        return
    yield "custom", StoredRule(resource, actions, ALLOW)
    if left := tuple(action for action in BOTH if action not in actions):
        yield "default", StoredRule(resource, left, DENY)


def _default_rule(found: Findings, value: YamlNode, kind: str) -> Iterator[StoredRule]:
    if words := value.text().strip():
        actions = _actions_of(found, value, words)
        yield StoredRule(f"{kind}:*", actions or (ALL,), ALLOW if actions else DENY)


def _actions_of(found: Findings, node: YamlNode, words: str) -> tuple[str, ...]:
    """Return the allowed actions; none for DENY."""
    actions = PERMISSIONS.get(frozenset(words.split("|")))
    if actions is None:
        found.remark(node.place, f"permission {words!r:.40} is unknown; as in RocketMQ, it is DENY")
        return ()
    return actions
