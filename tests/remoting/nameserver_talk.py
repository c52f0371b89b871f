"""A connection to the name server of a broker in memory."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from martlet.broker import Broker
from martlet.contracts import Buffer, Identity, LoginOrigin, Pace
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.handler import NameServerHandler
from martlet_remoting.nameserver.plugin import NameServerPlugin
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codec import FrameBuffer
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

BROKER: Mapping[str, object] = {"clusterName": "c", "brokerName": "b", "brokerId": "0", "brokerAddr": "b:0"}
REGISTRATION: Mapping[str, object] = {**BROKER, "haServerAddr": "h:0"}


def registration_body(*topics: str) -> bytes:
    table = {name: {"topicName": name, "perm": 6, "readQueueNums": 4, "writeQueueNums": 4} for name in topics}
    version = {"counter": 3, "stateVersion": 0, "timestamp": 5}
    return orjson.dumps({"topicConfigSerializeWrapper": {"topicConfigTable": table, "dataVersion": version}})


class ServerPeer:
    """The name server's side of a connection."""

    def __init__(self, host: str) -> None:
        self.address = f"{host}:50000"
        self.host = bytes(8)
        self.identity = Identity()
        self.encrypted = False
        self.sent = b""

    def login_origin(self, client_id: str = "") -> LoginOrigin:
        return LoginOrigin(self.address.rpartition(":")[0], "nameserver", client_id=client_id)

    def introduce(self, client: str, details: str = "") -> None: ...

    def send(self, *pieces: Buffer) -> None:
        self.sent += b"".join(map(bytes, pieces))

    def hold_until(self, position: int) -> None:
        raise AssertionError("a name server has no log to wait for")

    def before_commit(self, work: Callable[[], None]) -> None:
        raise AssertionError("a name server commits nothing")

    def pace(self) -> Pace:
        raise AssertionError("a name server has no quotas")

    def wake(self) -> None:
        raise AssertionError("a name server sends nothing by itself")

    wake_last = start_tls = wake

    def has_room(self) -> bool:
        return True

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        raise AssertionError("a name server starts no tasks")

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


class NameServerClient:
    """One connection to *server*, whose clients the plugins of *broker* judge."""

    def __init__(self, server: NameServer, broker: Broker, host: str = "127.0.0.1") -> None:
        self.peer = ServerPeer(host)
        self.handler = NameServerHandler(server, broker, self.peer)

    async def send(
        self, code: int, ext: Mapping[str, object], body: bytes = b"", *, flag: int = 0, version: int = 479
    ) -> list[Command]:
        """Send a request; return the answers, which are at most one."""
        rest = self.handler.handle(Command(code, ext, body, 7, flag, version=version))
        if rest is not None:
            await rest
        frames = FrameBuffer()
        frames.receive_data(self.peer.sent)
        self.peer.sent = b""
        return list(frames.commands())

    async def ask(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> Command:
        (answer,) = await self.send(code, ext, body)
        assert answer.opaque == 7
        return answer

    async def register(self, *topics: str, ext: Mapping[str, object] = REGISTRATION) -> Command:
        return await self.ask(RequestCode.REGISTER_BROKER, ext, registration_body(*topics))


async def open_nameserver(broker: Broker, *topics: str) -> NameServer:
    """Return a name server that knows broker ``b`` with *topics*, and one text in the namespace ``n``."""
    (server,) = NameServerPlugin(NameServerConfig(listen="127.0.0.1:0")).martlet_capabilities(broker).values()
    assert isinstance(server, NameServer)
    authorizers, broker.authorizers = broker.authorizers, ()
    client = NameServerClient(server, broker)
    assert (await client.register(*topics)).code == 0
    fields = {"namespace": "n", "key": "k", "value": "v"}
    assert (await client.ask(RequestCode.PUT_KV_CONFIG, fields)).code == 0
    broker.authorizers = authorizers
    return server
