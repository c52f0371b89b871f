"""What listeners learn about logins and administration, for an audit trail."""

from collections.abc import Callable

import pytest
from tests.delivery.pushing import broker_in_memory

from martlet.broker import Broker
from martlet.contracts import (
    AccessEvent,
    AccessKey,
    Certificate,
    Credentials,
    Identity,
    LoginEvent,
    LoginOrigin,
    Nobody,
    Password,
    PasswordCheck,
    Proved,
    SignedRequest,
)
from martlet.errors import Reason, Refused

ANN = Identity("ann")
HERE = LoginOrigin("10.1.2.3", "mqtt", "127.0.0.1:1883", "phone")


def watched(broker: Broker, *, refuses: bool) -> list[LoginEvent]:
    """Return the events of a broker whose authenticator knows one user."""

    def check() -> None:
        if refuses:
            raise Refused(Reason.CREDENTIALS, "wrong password")

    def ask(credentials: Credentials, origin: LoginOrigin) -> Identity | PasswordCheck | None:
        if isinstance(credentials, Password):
            return PasswordCheck(ANN, b"hash", check)
        if refuses and not isinstance(credentials, AccessKey):
            raise Refused(Reason.CREDENTIALS, "not known")
        return None if isinstance(credentials, Nobody | AccessKey) else ANN

    broker.authentication.authenticators = (ask,)
    events: list[LoginEvent] = []
    broker.authentication.listeners.append(events.append)
    return events


LOGINS: list[tuple[SignedRequest | Certificate | Nobody, str, str]] = [
    (Certificate("ann's phone", (), b""), "ann's phone", "certificate"),
    (Nobody(), "", "none"),
]


@pytest.mark.parametrize(("credentials", "user", "method"), LOGINS)
async def test_a_login_is_told_with_its_place_and_what_it_proved(
    credentials: Certificate | Nobody, user: str, method: str
) -> None:
    async with broker_in_memory() as broker:
        events = watched(broker, refuses=False)
        identity = broker.authentication.authenticate(credentials, HERE)
        assert events == [LoginEvent(HERE, user, method, identity)]


@pytest.mark.parametrize(
    ("credentials", "user", "method"), [*LOGINS, (SignedRequest("key", "x", b""), "key", "signature")]
)
async def test_a_refused_login_is_told_with_its_reason(
    credentials: SignedRequest | Certificate | Nobody, user: str, method: str
) -> None:
    async with broker_in_memory() as broker:
        events = watched(broker, refuses=True)
        with pytest.raises(Refused):
            broker.authentication.authenticate(credentials, HERE)
        assert events == [LoginEvent(HERE, user, method, None, "not known")]
        assert broker.authentication.refused == 1


async def test_a_password_is_told_once_it_is_checked() -> None:
    async with broker_in_memory() as broker:
        events = watched(broker, refuses=False)
        await broker.authentication.authenticate_password(Password("ann", b"x"), HERE)
        assert events == [LoginEvent(HERE, "ann", "password", ANN)]
        events = watched(broker, refuses=True)
        with pytest.raises(Refused):
            await broker.authentication.authenticate_password(Password("eve", b"sesame"), HERE)
        assert events == [LoginEvent(HERE, "eve", "password", None, "wrong password")]
        assert "sesame" not in repr(events)


async def test_signed_requests_are_told_by_who_counts_them() -> None:
    async with broker_in_memory() as broker:
        events = watched(broker, refuses=False)
        broker.authentication.authenticate(SignedRequest("key", "x", b""), HERE)
        assert events == []
        broker.authentication.note_signer(ANN, HERE)
        assert events == [LoginEvent(HERE, "ann", "signature", ANN)]


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_mechanism_is_told_at_its_end(refuses: bool) -> None:
    async with broker_in_memory() as broker:
        events = watched(broker, refuses=refuses)

        def exchange(data: bytes) -> Proved:
            if refuses:
                raise Refused(Reason.CREDENTIALS, "wrong proof")
            return Proved(ANN)

        if refuses:
            with pytest.raises(Refused):
                await broker.authentication.proceed(exchange, b"", HERE)
            assert events == [LoginEvent(HERE, "", "mechanism", None, "wrong proof")]
        else:
            await broker.authentication.proceed(exchange, b"", HERE)
            assert events == [LoginEvent(HERE, "ann", "mechanism", ANN)]


ADMINISTRATION: list[tuple[str, str, Callable[[Broker], object]]] = [
    ("create", "t", lambda broker: broker.gate(ANN, HERE).admin.topic("t")),
    ("create", "g", lambda broker: broker.gate(ANN, HERE).admin.group("g")),
    ("delete", "t", lambda broker: broker.gate(ANN, HERE).admin.topic_deletion("t")),
    ("delete", "g", lambda broker: broker.gate(ANN, HERE).admin.group_deletion("g")),
    ("update", "", lambda broker: broker.gate(ANN, HERE).admin.broker()),
]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(("action", "name", "administer"), ADMINISTRATION)
async def test_what_administrators_do_is_told_also_where_nobody_guards(
    action: str, name: str, administer: Callable[[Broker], object], is_open: bool
) -> None:
    async with broker_in_memory() as broker:
        if not is_open:
            broker.authorizers = (lambda identity, action, name: True,)
        events: list[AccessEvent] = []
        broker.rules.listeners.append(events.append)
        broker.gate(ANN, HERE).queries.topic("t")
        administer(broker)
        [event] = events
        assert (event.question.identity, event.question.action, event.question.name) == (ANN, action, name)
        assert (event.question.address, event.protocol, event.verdict.allowed) == ("10.1.2.3", "mqtt", True)
