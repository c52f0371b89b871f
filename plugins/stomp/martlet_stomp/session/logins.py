"""Authentication: ``login`` and ``passcode`` of CONNECT, or a client certificate."""

import re
from typing import Final

from martlet.access import Authentication
from martlet.contracts import Identity
from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.packets import Connect

__all__ = ["check_user_name", "needs_password_check"]

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_user_name(user: str) -> None:
    """Raise `StompError` if a client must not have the user name *user*."""
    if _CONTROL.search(user):
        raise StompError(f"login {shown(user)} contains a control character; use another user name")


def needs_password_check(authentication: Authentication, connect: Connect, proved: Identity) -> bool:
    """Return whether to check login and passcode; otherwise the client has the identity *proved* by its certificate.

    A login without a passcode is enough if the certificate has the same name.
    """
    login = connect.login
    if not connect.passcode and (not login or (proved.name and login == proved.name)):
        return False
    return bool(authentication.authenticators)
