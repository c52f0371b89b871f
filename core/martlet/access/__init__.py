"""Who a client is, and what it may do: authentication, access rules, and the gate that every protocol goes through."""

from martlet.access.authentication import ANONYMOUS, Authentication
from martlet.access.gate import Gate
from martlet.access.grant import Grant, PublishGrant
from martlet.access.rules import Rules

__all__ = ["ANONYMOUS", "Authentication", "Gate", "Grant", "PublishGrant", "Rules"]
