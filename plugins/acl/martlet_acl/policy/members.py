"""Users, and the groups that they belong to, directly or through other groups."""

from collections.abc import Iterable, Mapping
from typing import Final, final

from msgspec import Struct

from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.subjects import check_group_name, check_user_name

__all__ = ["Memberships", "UserRecord"]

USERS_MAX: Final = 100_000
GROUPS_MAX: Final = 10_000
# Groups that one user, or one group, names itself.
GROUPS_EACH_MAX: Final = 64
# Groups in a chain, each in the next one.
DEPTH_MAX: Final = 8


class UserRecord(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """What rules need to know of a user.

    Args:
      groups: the groups that the user is in. A group needs no record of its own.
      administrator: may do everything.
      disabled: may do nothing.
    """

    groups: tuple[str, ...] = ()
    administrator: bool = False
    disabled: bool = False


@final
class Memberships:
    """Users by name, and for each group the groups that it is in itself."""

    __slots__ = ("groups", "users")

    def __init__(self) -> None:
        self.users: dict[str, UserRecord] = {}
        self.groups: dict[str, tuple[str, ...]] = {}

    def put_user(self, name: str, user: UserRecord) -> None:
        """Add or replace a user. Raises `PolicyError`."""
        check_user_name(name)
        if name not in self.users and len(self.users) >= USERS_MAX:
            raise PolicyError(f"there would be more than {USERS_MAX} users")
        _check_groups(user.groups)
        self.users[name] = user

    def put_group(self, name: str, groups: Iterable[str]) -> None:
        """Let the group *name* be in *groups*, and in no others. Raises `PolicyError`, also for a cycle."""
        self.put_groups({name: tuple(groups)})

    def put_groups(self, added: Mapping[str, tuple[str, ...]]) -> None:
        """Do `put_group` for each of *added*, or raise `PolicyError` and change nothing."""
        for name, groups in added.items():
            check_group_name(name)
            try:
                _check_groups(groups)
            except PolicyError as error:
                raise error.inside(f"group {name}") from error
        together = {**self.groups, **added}
        if len(together) > GROUPS_MAX:
            raise PolicyError(f"there would be more than {GROUPS_MAX} groups")
        _check_nesting(together)
        self.groups = together

    def groups_of(self, name: str, further: Iterable[str] = ()) -> list[str]:
        """Return all groups of the user *name*, who also is in *further*: the nearest first, each once."""
        user = self.users.get(name)
        found = dict.fromkeys(user.groups if user is not None else ())
        found.update(dict.fromkeys(further))
        waiting = list(found)
        for group in waiting:  # grows while it runs
            for above in self.groups.get(group, ()):
                if above not in found:
                    found[above] = None
                    waiting.append(above)
        return waiting


def _check_groups(groups: tuple[str, ...]) -> None:
    if len(groups) > GROUPS_EACH_MAX:
        raise PolicyError(f"there are {len(groups)} groups; {GROUPS_EACH_MAX} are allowed")
    for group in groups:
        check_group_name(group)


def _check_nesting(groups: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `PolicyError` if a group is in itself, or if more than `DEPTH_MAX` are in a chain."""
    heights: dict[str, int] = {}
    for group in groups:
        _find_height(group, groups, heights, [])


def _find_height(name: str, groups: Mapping[str, tuple[str, ...]], heights: dict[str, int], path: list[str]) -> int:
    """Return how many groups the longest chain from *name* has, which *path* leads to."""
    known = heights.get(name)
    if known is not None:
        return known
    if name in path:
        cycle = [*path[path.index(name) :], name]
        raise PolicyError(f"group {name!r} is in itself: {' in '.join(cycle)}", f"group {name}")
    path.append(name)
    above = groups.get(name, ())
    if above and len(path) > DEPTH_MAX:
        raise PolicyError(f"groups are in each other over more than {DEPTH_MAX} levels: {' in '.join(path)}")
    height = 1 + max((_find_height(each, groups, heights, path) for each in above), default=0)
    path.pop()
    if height > DEPTH_MAX:
        raise PolicyError(f"group {name!r} begins a chain of {height} groups; {DEPTH_MAX} are allowed", f"group {name}")
    heights[name] = height
    return height
