"""Quotas of subjects: what a user, or the members of a group together, may send, receive and open."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Final, TypeAlias, final

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from martlet.contracts import Quota
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.subjects import group_of, parse_subject

__all__ = ["LIMITS", "StoredQuota", "SubjectQuotas", "changed_quota", "show_quota"]

# Some more than users and groups: users of tokens need no record.
QUOTAS_MAX: Final = 200_000
LIMIT_MAX: Final = 1 << 50

_Limit: TypeAlias = Annotated[int, Meta(ge=0, le=LIMIT_MAX)]


@final
class StoredQuota(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A quota as it is written: the limits of `martlet.contracts.Quota`, 0 for no limit."""

    messages_in: _Limit = 0
    bytes_in: _Limit = 0
    messages_out: _Limit = 0
    bytes_out: _Limit = 0
    connections: _Limit = 0
    subscriptions: _Limit = 0
    shared_groups: _Limit = 0
    refuses: bool = False


NONE: Final = StoredQuota()
LIMITS: Final = StoredQuota.__struct_fields__


def changed_quota(before: StoredQuota | None, changes: Mapping[str, int | bool]) -> StoredQuota:
    """Return *before* with *changes*, limits by name.

    Raises:
      PolicyError: there is no such limit, or its value is wrong; the place is its name.
    """
    try:
        return msgspec.convert({**asdict(before or NONE), **changes}, StoredQuota)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        raise PolicyError(text, *([place.rstrip("`")] if place else [])) from error


def show_quota(quota: StoredQuota) -> str:
    """Return *quota* in words, such as ``messages_in 10, refuses``."""
    words = [f"{name} {value}" for name, value in asdict(quota).items() if value and name != "refuses"]
    return ", ".join(words + ["refuses"] * quota.refuses) or "no limits"


@final
class SubjectQuotas:
    """The quotas by subject, such as ``user:alice``."""

    __slots__ = ("_quotas",)

    def __init__(self) -> None:
        self._quotas: dict[str, Quota] = {}  # as the core gets them

    def __len__(self) -> int:
        return len(self._quotas)

    def __iter__(self) -> Iterator[str]:
        """The subjects that have quotas."""
        return iter(self._quotas)

    def parts(self) -> Iterable[object]:
        """Return what this consists of, as `Policies.parts`."""
        return self._quotas.values()

    def get(self, subject: str) -> StoredQuota | None:
        """Return the quota of *subject*; None if it has none."""
        quota = self._quotas.get(subject)
        return StoredQuota(*(getattr(quota, name) for name in LIMITS)) if quota is not None else None

    def stored(self) -> dict[str, StoredQuota]:
        """Return the stored form of all quotas, by subject."""
        return {subject: quota for subject in self if (quota := self.get(subject)) is not None}

    def put(self, subject: str, quota: StoredQuota) -> None:
        """Let *quota* be that of *subject*. Raises `PolicyError`."""
        parse_subject(subject)
        if subject not in self._quotas and len(self._quotas) >= QUOTAS_MAX:
            raise PolicyError(f"there are {QUOTAS_MAX} quotas already")
        self._quotas[subject] = Quota(group_of(subject), **asdict(quota))

    def remove(self, subject: str) -> bool:
        """Remove the quota of *subject*; return whether there was one."""
        return self._quotas.pop(subject, None) is not None

    def of(self, subjects: Iterable[str]) -> list[Quota]:
        """Return the quotas of *subjects*, which are those of one identity; that of everybody only if its user has
        none of its own.
        """
        found: dict[str, Quota] = {}
        for subject in subjects:  # the user itself comes first, everybody last
            quota = self._quotas.get(subject)
            if quota is not None:
                found.setdefault(quota.group, quota)
        return list(found.values())
