"""A login in progress is refused if its user's logins are ended meanwhile, and one that has expired is none."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from martlet.access import Authentication
from martlet.access.ended_logins import ENDS_MAX, EndedLogins
from martlet.contracts import (
    AccessKey,
    Certificate,
    Challenge,
    Identity,
    LoginOrigin,
    Nobody,
    Password,
    PasswordCheck,
    Proved,
    SignedRequest,
    SigningSecret,
)
from martlet.errors import Reason, Refused

HERE = LoginOrigin("127.0.0.1", "toy", "127.0.0.1:1")
ANN, BOB = Identity("ann"), Identity("bob")
NOW_MS = 1_700_000_000_000
DISABLED = Refused(Reason.ENDED, "ann was disabled")


def is_ann(identity: Identity) -> bool:
    return identity.name == "ann"


class Checking:
    """An `Authentication` whose passwords are checked until the test lets them be right."""

    def __init__(self) -> None:
        self.authentication = Authentication(b"key", lambda: NOW_MS)
        self.authentication.line._in_thread = self._wait
        self.authentication.authenticators = (self._answer,)
        self.may_end = trio.Event()
        self.told: list[str] = []
        self.authentication.listeners.append(lambda event: self.told.append(event.reason))

    def _answer(self, credentials: Any, origin: LoginOrigin) -> PasswordCheck:
        return PasswordCheck(Identity(credentials.user), b"verifier", lambda: None)

    async def _wait(self, work: Callable[[], Any]) -> Any:
        await self.may_end.wait()
        return work()

    async def log_in(self, user: str, found: dict[str, object]) -> None:
        try:
            found[user] = await self.authentication.authenticate_password(Password(user, b"x"), HERE)
        except Refused as refused:
            found[user] = (refused.reason, str(refused))


async def test_a_password_that_is_being_checked_is_no_longer_enough(nursery: trio.Nursery) -> None:
    checking, found = Checking(), dict[str, object]()
    for user in ("ann", "bob"):
        nursery.start_soon(checking.log_in, user, found)
    await wait_all_tasks_blocked()
    checking.authentication.end_logins(is_ann, DISABLED)
    checking.may_end.set()
    await wait_all_tasks_blocked()
    assert found == {"ann": (Reason.CREDENTIALS, "ann was disabled"), "bob": BOB}
    assert sorted(checking.told) == ["", "ann was disabled"]
    await checking.log_in("ann", found)
    assert found["ann"] == ANN, "a login that begins later is another one"


async def test_an_exchange_that_began_before_is_no_longer_enough() -> None:
    authentication = Authentication(b"key", lambda: NOW_MS)
    authentication.mechanisms = {
        "TWO": lambda: lambda data: Proved(Identity(data.decode())) if data else Challenge(b"?")
    }
    exchanges = [authentication.begin("TWO") for _ in range(2)]
    for exchange in exchanges:
        assert await authentication.proceed(exchange, b"", HERE) == Challenge(b"?")
    authentication.end_logins(is_ann, DISABLED)
    with pytest.raises(Refused, match="ann was disabled"):
        await authentication.proceed(exchanges[0], b"ann", HERE)
    assert await authentication.proceed(exchanges[1], b"bob", HERE) == Proved(BOB)
    assert await authentication.proceed(authentication.begin("TWO"), b"ann", HERE) == Proved(ANN)


def test_a_login_during_very_many_ends_must_begin_again() -> None:
    ended = EndedLogins()
    for _ in range(ENDS_MAX):
        ended.add(is_ann, DISABLED)
    ended.check(BOB, 0)
    ended.add(is_ann, DISABLED)
    with pytest.raises(Refused, match="log in again") as refused:
        ended.check(BOB, 0)
    assert refused.value.reason is Reason.BUSY
    ended.check(BOB, 1)
    ended.check(ANN, ended.count)


def test_the_secrets_of_keys_are_asked_for_again_after_an_end() -> None:
    authentication = Authentication(b"key")
    generation = authentication.generation
    authentication.end_logins(is_ann, DISABLED)
    assert authentication.generation > generation


# expiry


@pytest.mark.parametrize("left_ms", [-1, 0, 1])
@pytest.mark.parametrize("credentials", [Nobody(), Certificate("ann", (), b""), SignedRequest("ann", "s", b"")])
def test_a_proof_that_has_expired_is_refused(credentials: Any, left_ms: int) -> None:
    authentication = Authentication(b"key", lambda: NOW_MS)
    proved = Identity("ann", expires_ms=NOW_MS + left_ms)
    authentication.authenticators = (lambda asked, origin: None if isinstance(asked, AccessKey) else proved,)
    if left_ms > 0:
        assert authentication.authenticate(credentials, HERE) == proved
    else:
        with pytest.raises(Refused, match="the login of 'ann' has expired") as refused:
            authentication.authenticate(credentials, HERE)
        assert refused.value.reason is Reason.CREDENTIALS


@pytest.mark.parametrize("left_ms", [0, 1])
async def test_so_is_that_of_a_password_a_mechanism_and_a_secret(left_ms: int) -> None:
    authentication = Authentication(b"key", lambda: NOW_MS)
    proved = Identity("ann", expires_ms=NOW_MS + left_ms)
    found: list[object] = []

    async def try_password(answer: Any) -> None:
        authentication.authenticators = (lambda asked, origin: answer,)
        found.append(await authentication.authenticate_password(Password("ann", b"x"), HERE))

    async def try_mechanism() -> None:
        authentication.mechanisms = {"ONE": lambda: lambda data: Proved(proved)}
        found.append(await authentication.proceed(authentication.begin("ONE"), b"", HERE))

    async def try_secret() -> None:
        authentication.authenticators = (lambda asked, origin: SigningSecret(proved, b"secret"),)
        signature = "C9mNGnUUqFu7g3e7jXULbgFJQFY="
        found.append(authentication.authenticate(SignedRequest("ann", signature, b"content"), HERE))

    attempts: list[Callable[[], Awaitable[None]]] = [
        lambda: try_password(proved),
        lambda: try_password(PasswordCheck(proved, b"v", lambda: None)),
        try_mechanism,
        try_secret,
    ]
    for attempt in attempts:
        if left_ms > 0:
            await attempt()
        else:
            with pytest.raises(Refused, match="the login of 'ann' has expired"):
                await attempt()
    assert len(found) == (4 if left_ms > 0 else 0)


def test_a_request_waits_no_longer_than_its_login_lasts() -> None:
    authentication = Authentication(b"key", lambda: NOW_MS)
    assert authentication.cut_wait_ms(ANN, 30_000) == 30_000
    assert authentication.cut_wait_ms(Identity("ann", expires_ms=NOW_MS + 500), 30_000) == 500
    assert authentication.cut_wait_ms(Identity("ann", expires_ms=NOW_MS + 500), 300) == 300
    assert authentication.cut_wait_ms(Identity("ann", expires_ms=NOW_MS - 500), 300) == 0
