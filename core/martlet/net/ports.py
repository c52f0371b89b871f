"""The configuration keys of a port: TLS, and who may connect."""

from martlet.access.networks import parse_networks
from martlet.config import setting
from martlet.contracts import PortNetworks
from martlet.net.tls import TlsConfig

__all__ = ["PortConfig"]


class PortConfig(TlsConfig):
    """The keys of a port: those of TLS, and who may connect.

    Plugins with a port derive their configuration from this class, and pass `port_networks` to their `Protocol`.
    """

    networks: list[str] = setting(
        [], "addresses and networks whose clients may connect, such as 10.0.0.0/8; empty: all; proxies always may"
    )
    proxy_networks: list[str] = setting(
        [],
        "addresses and networks of proxies: their connections, and no others, begin with a header of the PROXY "
        "protocol, which names the client; empty: none",
    )

    def port_networks(self, section: str) -> PortNetworks:
        """Return who may connect to the port of configuration section *section*.

        Raises:
          ConfigError: a network is invalid.
        """
        return PortNetworks(
            section,
            parse_networks(f"{section}.networks", self.networks),
            parse_networks(f"{section}.proxy_networks", self.proxy_networks),
        )
