"""Who a client is, and what it may do: authentication, access rules, and the gate that every protocol goes through."""

from martlet.access.authentication import ANONYMOUS, Authentication
from martlet.access.gate import Gate
from martlet.access.grant import (
    BrokerAdminGrant,
    BrokerGrant,
    ConsumeGrant,
    GroupAdminGrant,
    GroupGrant,
    PublishGrant,
    TopicAdminGrant,
    TopicFigures,
    TopicGrant,
)
from martlet.access.rules import Rules

__all__ = [
    "ANONYMOUS",
    "Authentication",
    "BrokerAdminGrant",
    "BrokerGrant",
    "ConsumeGrant",
    "Gate",
    "GroupAdminGrant",
    "GroupGrant",
    "PublishGrant",
    "Rules",
    "TopicAdminGrant",
    "TopicFigures",
    "TopicGrant",
]
