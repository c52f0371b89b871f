"""A port of a broker for tests with sockets: plain, or with TLS and certificates of one authority."""

from collections.abc import Mapping
from pathlib import Path

import trustme
from tests.wire_clients.streams import StreamWire, dial

from martlet.net.tls import client_context

__all__ = ["NO_TLS", "Port"]

NO_TLS: Mapping[str, str] = {}


class Port:
    """The address of a port, its certificates, and the connections to it."""

    def __init__(self, directory: Path) -> None:
        self.address = ""
        self._directory = directory
        self._authority = trustme.CA()
        self._wires: list[StreamWire] = []
        self._files = {name: str(directory / f"{name}.pem") for name in ("server", "ca")}
        self._authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(self._files["server"])
        self._authority.cert_pem.write_to_path(self._files["ca"])

    def bound(self, address: str) -> None:
        self.address = address

    def settings(self, tls: Mapping[str, str]) -> dict[str, str]:
        """Return the keys *tls* of a protocol's configuration, in which ``server`` and ``ca`` stand for their files."""
        return {name: self._files.get(value, value) for name, value in tls.items()}

    async def wire(self) -> StreamWire:
        self._wires.append(await dial(self.address))
        return self._wires[-1]

    async def tls_wire(self, user: str = "") -> StreamWire:
        """Return a connection with TLS, with a client certificate of *user* unless that is empty."""
        path = ""
        if user:
            path = str(self._directory / f"{user}.pem")
            self._authority.issue_cert(common_name=user).private_key_and_cert_chain_pem.write_to_path(path)
        self._wires.append(await dial(self.address, client_context(self._files["ca"], path)))
        return self._wires[-1]

    def close(self) -> None:
        """Close all connections."""
        for wire in self._wires:
            wire.close()
