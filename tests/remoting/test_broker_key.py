"""The key with which a broker proves itself to remote name servers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from martlet.broker import Broker
from martlet.config import fill
from martlet.contracts import AccessKey, Credentials, Identity, LoginOrigin, SigningSecret
from martlet.errors import ConfigError, Refused
from martlet.runtime.steps import finish_now
from martlet_remoting.cluster.broker_key import BrokerKey
from martlet_remoting.cluster.other_brokers import OtherBrokers
from martlet_remoting.cluster.registrar import Registrar, create_standard_topics
from martlet_remoting.config import RemotingConfig
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.handler import NameServerHandler
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codec import FrameBuffer
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import SLICE_BYTES, SigningKey, sign_in_slices

from .conftest import Harness, keep_nothing
from .nameserver_talk import ServerPeer

ADDRESS = "127.0.0.1:10911"
TROUBLE = "name server 127.0.0.1:9876: registration failed, retrying in 1 s; request 103 was answered 16: "


class GuardedNameServer:
    """A name server behind streams in memory that admits the broker by its secret."""

    def __init__(self, guard: Broker, nursery: trio.Nursery) -> None:
        self.server = NameServer(NameServerConfig(), keep_nothing)
        self.secret = b"one"
        self.hides_topics = False
        self.asked: list[Command] = []
        self.connects = 0
        self.streams: list[trio.abc.Stream] = []
        self._guard = guard
        self._nursery = nursery
        guard.authentication.authenticators = (self._authenticate,)
        guard.authorizers = (self._authorize,)

    def change_secret(self, secret: bytes) -> None:
        self.secret = secret
        self._guard.authentication.changed()

    def _authenticate(self, credentials: Credentials, origin: LoginOrigin) -> SigningSecret | None:
        if not isinstance(credentials, AccessKey):
            return None
        return SigningSecret(Identity("b"), self.secret if credentials.access_key == "b" else b"random")

    def _authorize(self, identity: Identity, action: str, name: str) -> bool:
        return identity.name == "b" and not (name and self.hides_topics)

    async def connect(self, host: str, port: int) -> trio.abc.Stream:
        self.connects += 1
        ours, theirs = trio.testing.memory_stream_pair()
        self.streams.append(theirs)
        self._nursery.start_soon(self._serve, theirs)
        return ours

    async def _serve(self, stream: trio.abc.Stream) -> None:
        peer, frames = ServerPeer("10.0.0.2"), FrameBuffer()
        handler = NameServerHandler(self.server, self._guard, peer)
        try:
            while data := await stream.receive_some(65536):
                frames.receive_data(bytes(data))
                for command in frames.commands():
                    self.asked.append(command)
                    rest = handler.handle(command)
                    if rest is not None:
                        await rest
                    answer, peer.sent = peer.sent, b""
                    await stream.send_all(answer)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass
        handler.closed("")

    def knows(self, topic: str = "TBW102") -> bool:
        return self.server.table.route(topic) is not None


class Place:
    """A broker that registers with a `GuardedNameServer`, and the file with its secret."""

    def __init__(self, harness: Harness, nursery: trio.Nursery, folder: Path, *, signs: bool = True) -> None:
        self.path = folder / "secret"
        self.write("one")
        keys = {"nameservers_key": "b", "nameservers_secret_file": str(self.path)} if signs else {}
        self.key = BrokerKey(fill(RemotingConfig, keys, "remoting"))
        self.server = GuardedNameServer(harness.broker, nursery)
        create_standard_topics(harness.broker)
        self.registrar = Registrar(
            harness.broker, ["127.0.0.1:9876"], connect=self.server.connect, key=self.key, register_s=30
        )
        self.registrar.bound(ADDRESS)
        nursery.start_soon(self.registrar.run)

    def write(self, secret: str) -> None:
        self.path.write_text(f"{secret}\n")
        self.path.chmod(0o640)

    def reload(self, secret: str) -> None:
        """What SIGHUP does after a change of the file."""
        self.write(secret)
        self.key.reload()
        self.registrar.retry()

    @property
    def state(self) -> object:
        states = self.registrar.statistics()["nameservers"]
        assert isinstance(states, dict)
        return states["127.0.0.1:9876"]


async def settle() -> None:
    """Run all tasks until they wait for time."""
    for _ in range(10):
        await trio.testing.wait_all_tasks_blocked()


@contextmanager
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings and errors that the block logs."""
    found: list[str] = []
    caplog.clear()
    with caplog.at_level(logging.WARNING, "martlet.remoting.registration"):
        yield found
    found += [record.getMessage() for record in caplog.records]


async def test_everything_is_signed(
    autojump_clock: trio.testing.MockClock, harness: Harness, nursery: trio.Nursery, tmp_path: Path
) -> None:
    place = Place(harness, nursery, tmp_path)
    await settle()
    harness.topic("T")
    await trio.sleep(65)
    assert [queues.broker_name for queues in await place.registrar.queues_elsewhere("T")] == ["martlet"]
    assert place.state == "registered"
    place.registrar.stop()
    await settle()
    assert {command.code for command in place.server.asked} == {
        RequestCode.REGISTER_BROKER,
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.UNREGISTER_BROKER,
    }
    assert {command.text("AccessKey") for command in place.server.asked} == {"b"}
    assert not place.server.knows()


async def test_a_broker_without_a_key_is_told_what_to_set(
    autojump_clock: trio.testing.MockClock,
    harness: Harness,
    nursery: trio.Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warnings(caplog) as found:
        place = Place(harness, nursery, tmp_path, signs=False)
        await settle()
    advice = (
        "set remoting.nameservers_key and remoting.nameservers_secret_file to a user who may update the cluster there"
    )
    assert found == [f"{TROUBLE}'' may not update the cluster; {advice}"]
    assert str(place.state).startswith("failed: request 103 was answered 16: ")
    assert not place.server.knows()


async def test_a_wrong_secret_is_named_and_the_right_one_counts_at_once(
    autojump_clock: trio.testing.MockClock,
    harness: Harness,
    nursery: trio.Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warnings(caplog) as found:
        place = Place(harness, nursery, tmp_path)
        place.server.change_secret(b"two")
        await settle()
    advice = f"user 'b' of remoting.nameservers_key must have the secret in {str(place.path)!r} there"
    wrong = "access key 'b' or the signature is wrong"
    assert found == [f"{TROUBLE}{wrong}; {advice}, and may update the cluster"]
    await trio.sleep(60)
    assert not place.server.knows()
    now = trio.current_time()
    place.reload("two")
    await settle()
    assert place.server.knows()
    assert (place.state, trio.current_time()) == ("registered", now)


async def test_a_rotated_secret_loses_no_route(
    autojump_clock: trio.testing.MockClock,
    harness: Harness,
    nursery: trio.Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The name server has the new secret first; until the broker has it, its requests are refused."""
    place = Place(harness, nursery, tmp_path)
    await settle()
    place.server.change_secret(b"two")
    harness.topic("T")
    for _ in range(100):
        await trio.sleep(0.5)
        assert place.server.knows()
    assert not place.server.knows("T")
    await settle()
    assert str(place.state).startswith("failed: ")
    place.reload("two")
    await settle()
    assert place.server.knows("T")
    assert (place.state, place.server.connects) == ("registered", 1)
    # The other way round: the broker has the new secret first.
    place.reload("three")
    await trio.sleep(31)
    await settle()
    assert str(place.state).startswith("failed: ")
    place.server.change_secret(b"three")
    await trio.sleep(11)
    await settle()
    assert (place.state, place.server.connects) == ("registered", 1)


async def test_a_refused_broker_notices_that_the_connection_closed(
    autojump_clock: trio.testing.MockClock, harness: Harness, nursery: trio.Nursery, tmp_path: Path
) -> None:
    place = Place(harness, nursery, tmp_path)
    place.server.change_secret(b"two")
    await settle()
    assert place.server.connects == 1
    await place.server.streams[0].aclose()
    await trio.sleep(5)
    assert place.server.connects == 2


async def test_a_route_that_the_broker_may_not_see_is_logged_once(
    autojump_clock: trio.testing.MockClock,
    harness: Harness,
    nursery: trio.Nursery,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place(harness, nursery, tmp_path)
    await settle()
    place.server.hides_topics = True
    harness.broker.rules.changed()
    with warnings(caplog) as found:
        for topic in "TBW102", "SELF_TEST_TOPIC", "nowhere":
            assert list(await place.registrar.queues_elsewhere(topic)) == []
    text = "name server 127.0.0.1:9876 gives no route for topic[TBW102], which this broker has registered"
    assert found == [f"{text}; let the user of remoting.nameservers_key get all topics there"]


async def test_consumers_hear_that_a_name_server_refused_the_broker(
    autojump_clock: trio.testing.MockClock, harness: Harness, nursery: trio.Nursery, tmp_path: Path
) -> None:
    place = Place(harness, nursery, tmp_path)
    place.server.change_secret(b"two")
    with pytest.raises(
        Refused, match="request 105 was answered 16: access key 'b' or the signature is wrong; user 'b'"
    ):
        await OtherBrokers(place.registrar).ask("TBW102")


# the settings


def test_without_settings_nothing_is_signed() -> None:
    assert BrokerKey(RemotingConfig()).signing_key is None


@pytest.mark.parametrize(
    ("keys", "mode", "text"),
    [
        ({"nameservers_key": "b"}, 0o600, "'remoting.nameservers_key' has a value, but '.*_secret_file' is empty"),
        ({"nameservers_secret_file": "F"}, 0o600, "_secret_file' has a value, but 'remoting.nameservers_key' is empty"),
        ({"nameservers_key": "b", "nameservers_secret_file": "/nowhere"}, 0o600, "'/nowhere' cannot be read"),
        ({"nameservers_key": "b", "nameservers_secret_file": "F"}, 0o644, "is open to every user .*; run: chmod o= /"),
        ({"nameservers_key": "b", "nameservers_secret_file": "F"}, 0o602, "is open to every user of this machine"),
        ({"nameservers_key": "\ud800", "nameservers_secret_file": "F"}, 0o600, "contains half of a surrogate pair"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, keys: dict[str, str], mode: int, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text("s3cret\n")
    path.chmod(mode)
    config = fill(
        RemotingConfig, {key: str(path) if value == "F" else value for key, value in keys.items()}, "remoting"
    )
    with pytest.raises(ConfigError, match=text) as failed:
        BrokerKey(config)
    assert "s3cret" not in str(failed.value)


def test_a_reload_that_fails_keeps_the_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    path.write_text("one")
    path.chmod(0o600)
    keys = {"nameservers_key": "b", "nameservers_secret_file": str(path)}
    key = BrokerKey(fill(RemotingConfig, keys, "remoting"))
    path.write_text("two")
    path.chmod(0o644)
    key.reload()
    assert key.signing_key == SigningKey("b", "one")
    assert "cannot be reloaded, keeping the old one" in caplog.text
    path.chmod(0o440)
    key.reload()
    assert key.signing_key == SigningKey("b", "two")


@pytest.mark.parametrize("sizes", [[], [0], [5, 7], [SLICE_BYTES, 1], [3 * SLICE_BYTES + 1, 2, SLICE_BYTES]])
def test_signatures_in_slices_are_the_same(sizes: list[int]) -> None:
    parts, ext = [bytes([65 + place]) * size for place, size in enumerate(sizes)], {"b": "x", "a": 5}
    key = SigningKey("b", "one")
    assert finish_now(sign_in_slices(key, ext, parts)) == key.sign(0, ext, b"".join(parts))
    slices = sum(1 for _ in sign_in_slices(key, ext, parts))
    assert slices == sum(sizes) // SLICE_BYTES
