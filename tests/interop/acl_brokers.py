"""A Martlet with the plugin acl and a RocketMQ 5.5.0 with its ACL 2.0; both begin with one user, an administrator."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from martlet_remoting.wire.signatures import SigningKey

from . import wire
from .conftest import RocketMQ
from .martlet_process import Martlet
from .process import eventually
from .test_users import ANN, closed_settings

__all__ = ["ROOT", "Brokers", "signed"]

# As a key of `Java.mqadmin`, and as a signer.
ROOT = dict(ANN)


def acl_martlet(folder: Path, more: Mapping[str, str] | None = None) -> Martlet:
    """Start a broker whose only user is the administrator."""
    config = folder / "data" / "config"
    config.mkdir(parents=True)
    name = ROOT["access_key"]
    (config / "acl.json").write_text(json.dumps({"users": {name: {"administrator": True}}}))
    secrets = config / "acl.secrets"
    secrets.touch(0o600)
    secrets.write_text(json.dumps({"users": {name: {"keys": {name: {"secret": ROOT["secret_key"]}}}}}))
    return Martlet(folder, {"plugins.enabled": '["nameserver", "remoting", "acl"]', **(more or {})})


class Brokers:
    """Both, by kind."""

    def __init__(self, folder: Path) -> None:
        with ExitStack() as unless_started:
            self.martlet = acl_martlet(folder / "martlet")
            unless_started.callback(self.martlet.close)
            self.rocketmq = RocketMQ(folder / "rocketmq", closed_settings())
            unless_started.pop_all()

    def both(self) -> tuple[tuple[str, Martlet | RocketMQ], ...]:
        return ("martlet", self.martlet), ("rocketmq", self.rocketmq)

    def close(self) -> None:
        self.martlet.close()
        self.rocketmq.close()


def signed(
    address: str, user: Mapping[str, str], code: int, fields: Mapping[str, object], body: object = b""
) -> wire.Answer:
    """Send a request that *user* has signed, and return its answer; a *body* that is no bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    ext: Mapping[str, Any] = SigningKey(user["access_key"], user["secret_key"]).sign(code, fields, data)
    said = {name: str(value) for name, value in ext.items()}
    return eventually(lambda: wire.ask(address, code, said, data))
