"""Martlet with MQTT, as the tests of MQTT clients start it."""

from pathlib import Path

import trustme

from .martlet_process import Martlet
from .mqtt_clients import Link


class MqttMartlet(Martlet):
    """A broker whose MQTT port takes plain TCP, TLS and WebSocket; ``ca`` is the file with its authority."""

    def __init__(self, folder: Path, listen: str = "127.0.0.1:0") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        self.ca = str(folder / "ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        super().__init__(folder, {"mqtt.tls_cert": str(folder / "server.pem"), "mqtt.listen": listen})

    @property
    def port(self) -> int:
        return int(self.mqtt.rpartition(":")[2])

    def link(self, scheme: str = "mqtt", version: int = 5) -> Link:
        """Return how to connect; *scheme*: mqtt, mqtts, ws or wss."""
        path = "/" if scheme in ("ws", "wss") else ""
        url = f"{scheme}://localhost:{self.port}{path}"
        return Link(url, version, self.ca if scheme in ("mqtts", "wss") else None)
