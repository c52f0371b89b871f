"""Networks in rules: IPv4 and IPv6 addresses, or networks such as ``10.0.0.0/8``."""

from functools import lru_cache
from typing import Final

from martlet.access.networks import parse_network as parse_plain
from martlet.contracts import Network
from martlet.errors import ConfigError
from martlet_acl.policy.errors import PolicyError

__all__ = ["parse_network", "show_network"]

CACHED_MAX: Final = 4096


@lru_cache(CACHED_MAX)
def parse_network(text: str) -> Network:
    """Return the network that *text* names; bits behind the length of its prefix are cleared.

    Raises:
      PolicyError: it names none.
    """
    try:
        return parse_plain(text)
    except ConfigError as error:
        raise PolicyError(str(error)) from error


def show_network(network: Network) -> str:
    """Return *network* as text; a single address has no prefix length."""
    return str(network.network_address if network.prefixlen == network.max_prefixlen else network)
