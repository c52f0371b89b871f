"""Access control: authentication, access rules, and the gate through which protocols use the broker."""

from martlet.access.allowances import UNLIMITED, Allowance
from martlet.access.authentication import ANONYMOUS, Authentication
from martlet.access.gate import Gate, publish_together
from martlet.access.grant import (
    BrokerAdminGrant,
    BrokerGrant,
    ConsumeGrant,
    GroupAdminGrant,
    GroupDeletionGrant,
    GroupGrant,
    PublishGrant,
    TopicAdminGrant,
    TopicDeletionGrant,
    TopicGrant,
    TopicOffsets,
)
from martlet.access.queries import AdminGate, QueryGate
from martlet.access.quotas import Quotas
from martlet.access.replies import NO_CORRELATION, Replies, is_uncorrelated
from martlet.access.revocation import Login, Revocation
from martlet.access.round_publishes import PublishAnswers, PublishedPart, RoundPublishes
from martlet.access.rules import Rules
from martlet.access.signers import Signer
from martlet.access.transactions import ExternalGate, TransactionGate

__all__ = [
    "ANONYMOUS",
    "NO_CORRELATION",
    "UNLIMITED",
    "AdminGate",
    "Allowance",
    "Authentication",
    "BrokerAdminGrant",
    "BrokerGrant",
    "ConsumeGrant",
    "ExternalGate",
    "Gate",
    "GroupAdminGrant",
    "GroupDeletionGrant",
    "GroupGrant",
    "Login",
    "PublishAnswers",
    "PublishGrant",
    "PublishedPart",
    "QueryGate",
    "Quotas",
    "Replies",
    "Revocation",
    "RoundPublishes",
    "Rules",
    "Signer",
    "TopicAdminGrant",
    "TopicDeletionGrant",
    "TopicGrant",
    "TopicOffsets",
    "TransactionGate",
    "is_uncorrelated",
    "publish_together",
]
