"""One rule: may somebody do these actions on these resources, from these networks?"""

from functools import lru_cache
from typing import Final, final

from msgspec import Struct

from martlet.contracts import Network
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.networks import parse_network, show_network
from martlet_acl.policy.resources import Resource, parse_resource

__all__ = ["ACTIONS", "ALL", "BITS", "Rule", "StoredRule", "mask_of", "parse_rule"]

ACTIONS: Final = ("publish", "subscribe", "create", "update", "delete", "get", "list")
ALL: Final = "all"
ALLOW: Final = "allow"
DENY: Final = "deny"
NETWORKS_MAX: Final = 256
CACHED_MAX: Final = 1024

BITS: Final = {action: 1 << number for number, action in enumerate(ACTIONS)}
_ALL_BITS: Final = (1 << len(ACTIONS)) - 1
_MASKS: Final = {**BITS, ALL: _ALL_BITS}


@final
class StoredRule(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A rule as it is written: each field is text.

    Args:
      resource: see `martlet_acl.policy.resources`.
      actions: of `ACTIONS`, or `ALL`.
      decision: ``allow`` or ``deny``.
      networks: addresses and networks of clients; empty for all.
    """

    resource: str
    actions: tuple[str, ...]
    decision: str
    networks: tuple[str, ...] = ()


@final
class Rule(Struct, frozen=True, gc=False):
    """A checked rule; *actions* has a bit for each action, and no *networks* are all of them."""

    resource: Resource
    actions: int
    allow: bool
    networks: tuple[Network, ...] = ()

    def stored(self) -> StoredRule:
        """Return the rule as it is written."""
        networks = tuple(map(show_network, self.networks))
        return StoredRule(self.resource.text, self._words(), ALLOW if self.allow else DENY, networks)

    def _words(self) -> tuple[str, ...]:
        if self.actions == _ALL_BITS:
            return (ALL,)
        return tuple(action for action, bit in BITS.items() if self.actions & bit)

    def __str__(self) -> str:
        where = f" from {', '.join(map(show_network, self.networks))}" if self.networks else ""
        return f"{ALLOW if self.allow else DENY} {', '.join(self._words())} on {self.resource}{where}"


@lru_cache(CACHED_MAX)
def mask_of(actions: tuple[str, ...]) -> int:
    """Return the bits of *actions*.

    Raises:
      PolicyError: there are none, or one is unknown.
    """
    mask = 0
    for action in actions:
        try:
            mask |= _MASKS[action]
        except KeyError:
            raise PolicyError(f"action {action!r} is unknown; write {', '.join(ACTIONS)} or {ALL}") from None
    if not mask:
        raise PolicyError(f"there are no actions; write {', '.join(ACTIONS)} or {ALL}")
    return mask


def parse_rule(stored: StoredRule) -> Rule:
    """Return the rule that *stored* is.

    Raises:
      PolicyError: a field is invalid; the place is its name.
    """
    field = "resource"
    try:
        resource = parse_resource(stored.resource)
        field = "actions"
        actions = mask_of(stored.actions)
        field = "decision"
        if stored.decision not in (ALLOW, DENY):
            raise PolicyError(f"decision {stored.decision!r} is unknown; write {ALLOW} or {DENY}")
        field = "networks"
        if len(stored.networks) > NETWORKS_MAX:
            raise PolicyError(f"there are {len(stored.networks)} networks; a rule has {NETWORKS_MAX} at most")
        networks = tuple(dict.fromkeys(map(parse_network, stored.networks)))
    except PolicyError as error:
        raise error.inside(field) from error
    return Rule(resource, actions, stored.decision == ALLOW, networks)
