"""Networks in rules: IPv4 and IPv6 addresses, or networks such as ``10.0.0.0/8``."""

from functools import lru_cache
from ipaddress import IPv6Network, ip_network
from typing import Final

from martlet.contracts import Network
from martlet_acl.policy.errors import PolicyError

__all__ = ["parse_network", "show_network"]

CACHED_MAX: Final = 4096


@lru_cache(CACHED_MAX)
def parse_network(text: str) -> Network:
    """Return the network that *text* names; bits behind the length of its prefix are cleared.

    Raises:
      PolicyError: it names none.
    """
    address, slash, length = text.partition("/")
    if slash and not (length.isascii() and length.isdigit()):
        raise PolicyError(f"network {text!r} has no number after the slash; write it as 10.0.0.0/8")
    if "%" in address:
        raise PolicyError(f"network {text!r} names an interface; leave out the '%' and what follows")
    try:
        network = ip_network(text, strict=False)
    except ValueError as error:
        raise PolicyError(f"network {text!r} is no address such as 10.0.0.1 and no network such as fd00::/8") from error
    if isinstance(network, IPv6Network) and (mapped := network.network_address.ipv4_mapped) and network.prefixlen >= 96:
        raise PolicyError(f"network {text!r} has IPv4 clients; write {mapped}/{network.prefixlen - 96}")
    return network


def show_network(network: Network) -> str:
    """Return *network* as text; a single address has no prefix length."""
    return str(network.network_address if network.prefixlen == network.max_prefixlen else network)
