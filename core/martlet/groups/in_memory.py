"""The shared groups that are in memory, by topic and group."""

from itertools import islice
from typing import Final, final

from martlet.groups.group import SharedGroup
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.user_limits import Place

__all__ = ["GroupsInMemory"]

# Groups without members checked in a search for one that can be dropped from memory.
UNUSED_LOOKED_AT: Final = 256


@final
class GroupsInMemory:
    """The groups with members, and groups that were used lately; ``by_place`` has all of them."""

    def __init__(self) -> None:
        self.by_place: dict[Place, SharedGroup] = {}
        self._by_topic: dict[str, dict[SharedGroup, None]] = {}
        self._by_group: dict[str, dict[SharedGroup, None]] = {}  # consumer groups
        self._empty: dict[SharedGroup, None] = {}  # groups without members

    def get(self, topic: str, group: str, scope: str) -> SharedGroup | None:
        """Return a group; None if it is not in memory."""
        return self.by_place.get((topic, group, scope))

    def of(self, context: GroupContext) -> SharedGroup | None:
        """Return the group of *context* if it is in use; its topic may have been deleted and created again since."""
        group = self.by_place.get(context.place)
        return group if group is not None and group.context is context else None

    def on_topic(self, topic: str) -> list[SharedGroup]:
        """Return the groups on *topic*."""
        return list(self._by_topic.get(topic, ()))

    def of_consumers(self, group: str) -> list[SharedGroup]:
        """Return the consumer group *group* on each of its topics."""
        return list(self._by_group.get(group, ()))

    def find_unused(self, user: str | None) -> SharedGroup | None:
        """Return a group that can be dropped, of *user* if given; None if there is none among those checked."""
        for each in islice(self._empty, UNUSED_LOOKED_AT):
            if each.is_unused and user in (None, each.context.user):
                return each
        return None

    def add(self, shared_group: SharedGroup) -> None:
        """Add a group, which has no members yet."""
        context = shared_group.context
        self.by_place[context.place] = shared_group
        self._by_topic.setdefault(context.topic.name, {})[shared_group] = None
        if context.policy is None:
            self._by_group.setdefault(context.group, {})[shared_group] = None
        self._empty[shared_group] = None

    def remove(self, shared_group: SharedGroup) -> None:
        """Remove a group."""
        context = shared_group.context
        del self.by_place[context.place]
        _remove(self._by_topic, context.topic.name, shared_group)
        if context.policy is None:
            _remove(self._by_group, context.group, shared_group)
        self._empty.pop(shared_group, None)

    def joined(self, shared_group: SharedGroup) -> None:
        """Note that a group has a member."""
        self._empty.pop(shared_group, None)

    def left(self, shared_group: SharedGroup) -> None:
        """Note that the last member of a group has left."""
        self._empty[shared_group] = None


def _remove(table: dict[str, dict[SharedGroup, None]], name: str, shared_group: SharedGroup) -> None:
    del table[name][shared_group]
    if not table[name]:
        del table[name]
