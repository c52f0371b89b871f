"""What is found in a file of another program."""

from typing import Final, final

from msgspec import Struct

from martlet.contracts import RuleLevel
from martlet_acl.credentials import check_secret
from martlet_acl.passwords import parse_verifier
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.rules import StoredRule, parse_rule
from martlet_acl.policy.subjects import check_user_name, parse_subject

__all__ = ["Findings", "Imported", "ImportedRule", "ImportedUser"]

REMARKS_MAX: Final = 1000


@final
class ImportedUser(Struct, frozen=True):
    """A user, and what it logs in with.

    Args:
      password: the text of a verifier (`martlet_acl.passwords`); empty for none.
      secret: of the access key with the user's name; empty for none.
      connections: how many the user may have at the same time; 0 for any number.
    """

    name: str
    administrator: bool = False
    password: str = ""
    secret: str = ""
    connections: int = 0

    def __repr__(self) -> str:
        return f"ImportedUser(name={self.name!r}, administrator={self.administrator!r})"


@final
class ImportedRule(Struct, frozen=True):
    """A valid rule of *subject*."""

    subject: str
    level: RuleLevel
    rule: StoredRule


@final
class Imported(Struct, frozen=True):
    """Users by name, rules, of which no two of a subject and level are about the same resource, and remarks."""

    users: dict[str, ImportedUser]
    rules: list[ImportedRule]
    remarks: list[str]


@final
class Findings:
    """Collects users, rules and remarks. Each *place* is a part of the file, such as ``line 3``."""

    def __init__(self) -> None:
        self.users: dict[str, ImportedUser] = {}
        self._rules: dict[tuple[str, RuleLevel, str], ImportedRule] = {}
        self._remarks: list[str] = []
        self._count = 0

    def remark(self, place: str, text: str) -> None:
        """Say what is not imported, or what is different; *place* may be empty."""
        self._count += 1
        if self._count <= REMARKS_MAX:
            self._remarks.append(f"{place}: {text}" if place else text)

    def note_once(self, text: str) -> None:
        """Add a remark about the whole file, unless it is there already."""
        if text not in self._remarks:
            self.remark("", text)

    def add_user(self, place: str, user: ImportedUser) -> bool:
        """Add *user*, without secrets that are invalid; return False if there cannot be such a user."""
        try:
            check_user_name(user.name)
        except PolicyError as error:
            self.remark(place, f"{error}; the user is not imported")
            return False
        if user.name in self.users:
            self.remark(place, f"user {user.name!r} is there already; only the first one is imported")
            return False
        password, secret = user.password, user.secret
        try:
            if password:
                parse_verifier(password)
        except PolicyError as error:
            self.remark(place, f"password of user {user.name!r}: {error}")
            password = ""
        try:
            if secret:
                check_secret(secret)
        except PolicyError as error:
            self.remark(place, f"secret of user {user.name!r}: {error}; give the user another one")
            secret = ""
        self.users[user.name] = ImportedUser(user.name, user.administrator, password, secret, user.connections)
        return True

    @property
    def rules(self) -> list[ImportedRule]:
        """The rules that were added."""
        return list(self._rules.values())

    def put_rule(self, place: str, subject: str, level: RuleLevel, rule: StoredRule) -> bool:
        """Add *rule*, which replaces an earlier one about the same resource; return whether it is valid."""
        try:
            parse_subject(subject)
            parse_rule(rule)
        except PolicyError as error:
            self.remark(place, str(error))
            return False
        self._rules[subject, level, rule.resource] = ImportedRule(subject, level, rule)
        return True

    def finish(self) -> Imported:
        """Return everything."""
        if self._count > REMARKS_MAX:
            self._remarks.append(f"there are {self._count - REMARKS_MAX} more remarks")
        return Imported(self.users, self.rules, self._remarks)
