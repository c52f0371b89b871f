"""Who a client is by its certificate, alone and with a user name and a password."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.mqtt.users import Users
from tests.wire_clients.mqtt import V5, MqttClient, MqttPort, mqtt_port

from martlet.contracts import Identity
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[MqttPort]:
    """A port that asks for certificates, of a broker that knows ann and bob."""
    users = Users(tmp_path)
    users.write(ann="read mqtt/#", bob="read mqtt/#")
    async with mqtt_port(tmp_path, {"tls": "enforcing", "tls_cert": "server", "tls_client_ca": "ca"}) as port:
        users.install(port.broker.broker)
        yield port


async def answer(port: MqttPort, certificate: str, user: str | None, password: bytes | None) -> Connack:
    """Return the answer to CONNECT; the connection stays open."""
    talk = MqttClient(await port.tls_wire(certificate))
    await talk.send(Connect("c", V5, user_name=user, password=password))
    return await talk.expect(Connack)


@pytest.mark.parametrize(
    ("certificate", "user", "password", "expected"),
    [
        ("ann", None, None, "ann"),
        ("ann", "ann", None, "ann"),  # a name without a password proves nothing more
        ("ann", "bob", b"bob", "bob"),  # the password decides
        ("ann", "ann", b"ann", "ann"),
        ("mallory", None, None, ""),  # nobody knows it
        ("mallory", "ann", b"ann", "ann"),
    ],
)
async def test_a_certificate_counts_if_there_is_no_password(
    port: MqttPort, certificate: str, user: str | None, password: bytes | None, expected: str
) -> None:
    assert (await answer(port, certificate, user, password)).reason == ReasonCode.SUCCESS
    assert port.broker.context.clients["c"].identity == Identity(expected)


@pytest.mark.parametrize(
    ("certificate", "user", "password"),
    [("ann", "bob", None), ("ann", "ann", b"a guess"), ("mallory", "ann", None), ("ann", None, b"ann")],
)
async def test_a_wrong_user_name_or_password_is_refused_whatever_the_certificate_says(
    port: MqttPort, certificate: str, user: str | None, password: bytes | None
) -> None:
    assert (await answer(port, certificate, user, password)).reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD
    assert not port.broker.context.clients
