"""The subjects of rules, as text: ``user:alice``, ``group:devs``, ``everybody`` or ``anonymous``.

``everybody`` are all users who have logged in. Clients that have not are ``anonymous``, and have only its rules.
"""

import re
from typing import Final

from martlet_acl.policy.errors import PolicyError

__all__ = [
    "ANONYMOUS",
    "EVERYBODY",
    "NAME_MAX",
    "check_group_name",
    "check_key_name",
    "check_user_name",
    "group_of",
    "group_subject",
    "parse_subject",
    "show_subject",
    "user_subject",
]

EVERYBODY: Final = "everybody"
ANONYMOUS: Final = "anonymous"
NAME_MAX: Final = 255

_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def user_subject(name: str) -> str:
    """Return the subject for the user *name*."""
    return f"user:{name}"


def group_subject(name: str) -> str:
    """Return the subject for the group *name*."""
    return f"group:{name}"


def group_of(subject: str) -> str:
    """Return the name of the group that *subject* is; empty if it is none."""
    kind, _, name = subject.partition(":")
    return name if kind == "group" else ""


def show_subject(subject: str) -> str:
    """Return *subject* for people, such as ``user alice``."""
    return subject.replace(":", " ", 1)


def parse_subject(text: str) -> str:
    """Return *text*, which names a subject.

    Raises:
      PolicyError: it names none.
    """
    if text in (EVERYBODY, ANONYMOUS):
        return text
    kind, colon, name = text.partition(":")
    if kind == "user" and colon:
        check_user_name(name)
    elif kind == "group" and colon:
        check_group_name(name)
    else:
        raise PolicyError(f"subject {text!r} is unknown; write user:NAME, group:NAME, {EVERYBODY} or {ANONYMOUS}")
    return text


def check_user_name(name: str) -> None:
    """Raise `PolicyError` unless *name* may be a user's."""
    _check_name("user", name)


def check_group_name(name: str) -> None:
    """Raise `PolicyError` unless *name* may be a group's."""
    _check_name("group", name)


def check_key_name(name: str) -> None:
    """Raise `PolicyError` unless *name* may be that of an access key."""
    _check_name("access key", name)


def _check_name(kind: str, name: str) -> None:
    if not name:
        raise PolicyError(f"{'an' if kind[0] == 'a' else 'a'} {kind} has an empty name")
    if len(name) > NAME_MAX:
        raise PolicyError(f"{kind} {name[:40]!r} and so on has {len(name)} characters; {NAME_MAX} are allowed")
    if _UNPRINTABLE.search(name):
        raise PolicyError(f"{kind} {name!r} has a control character in its name")
