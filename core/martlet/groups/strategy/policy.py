"""The rules of shared groups that are no consumer groups."""

from typing import Final, final

from msgspec import Struct

from martlet.errors import LocalProtocolError
from martlet.groups.strategy.sticky import Sticky

__all__ = ["AUTO_DELETE", "OWNS_TOPIC", "GroupPolicy"]

# Marks of a group on a topic. The topic was created for the group, and is deleted with it if nothing else uses it.
OWNS_TOPIC: Final = 1
# The group is personal: it is deleted with its last member.
AUTO_DELETE: Final = 2


@final
class GroupPolicy(Struct, frozen=True):
    """The retry policy of a group that is not a consumer group; its name may be any text, unique within *scope*.

    Args:
      scope: the owner of the group's name, such as the protocol. Authorizers see ``$share/<scope>/<group>``, so it must
        not contain ``/``; the group may.
      retries_max: a message is dead after its first delivery and this many redeliveries failed; -1 for no limit.
      dead_letters: the topic for dead messages; if empty, they are dropped. In this topic itself there is no limit of
        retries: a copy at its end would only fail again.
      leaving_counts: whether the redelivery of a message whose holder has left, or whose lease has ended, is a retry.
        If not, such a message is available again at once, and only `Member.nack` makes a message dead.
      in_parts: whether all members with credit get a part of the new messages. If not, one member gets as many as its
        credit allows, which costs less.
      sticky: the rule for messages that stay with one member, in order; None if all may go to any member.
    """

    scope: str
    retries_max: int = -1
    dead_letters: str = ""
    leaving_counts: bool = True
    in_parts: bool = False
    sticky: Sticky | None = None

    def __post_init__(self) -> None:
        if not self.scope or "/" in self.scope:
            wrong = "contains '/'" if self.scope else "is empty"
            raise LocalProtocolError(f"scope {self.scope!r} of a shared group {wrong}; give for example 'stomp'")
