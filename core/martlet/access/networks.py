"""Networks in configuration and rules, and classes of addresses: which of these networks contain an address."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import final

from martlet.contracts import Network
from martlet.errors import ConfigError

__all__ = ["AddressClasses", "parse_network", "parse_networks", "plain_address"]


def parse_network(text: str) -> Network:
    """Return the network that *text* names: an address, or one such as ``10.0.0.0/8``.

    Bits after the length of its prefix are cleared.

    Raises:
      ConfigError: it names none.
    """
    address, slash, length = text.partition("/")
    if slash and not (length.isascii() and length.isdigit()):
        raise ConfigError(f"network {text!r} has no number after the slash; write it as 10.0.0.0/8")
    if "%" in address:
        raise ConfigError(f"network {text!r} names an interface; leave out the '%' and what follows")
    try:
        network = ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(f"network {text!r} is no address such as 10.0.0.1 and no network such as fd00::/8") from error
    if isinstance(network, IPv6Network) and (mapped := network.network_address.ipv4_mapped) and network.prefixlen >= 96:
        raise ConfigError(f"network {text!r} has IPv4 clients; write {mapped}/{network.prefixlen - 96}")
    return network


def parse_networks(key: str, texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks that *texts*, the value of configuration key *key*, names.

    Raises:
      ConfigError: one of them is invalid.
    """
    try:
        return tuple(map(parse_network, texts))
    except ConfigError as error:
        raise ConfigError(f"config key {key!r}: {error}") from error


def plain_address(address: str) -> IPv4Address | IPv6Address | None:
    """Return *address*, an IPv4 address inside of IPv6 as the IPv4 address; None if it is none."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return mapped or parsed


@final
class AddressClasses:
    """Tells addresses apart by the *networks* that contain them: one look-up per length of a prefix."""

    __slots__ = ("_by_length",)

    def __init__(self, networks: Iterable[Network]) -> None:
        self._by_length: dict[tuple[int, int], set[int]] = {}  # (IP version, bits that vary) -> prefixes
        for network in networks:
            free_bits = network.max_prefixlen - network.prefixlen
            prefixes = self._by_length.setdefault((network.version, free_bits), set())
            prefixes.add(int(network.network_address) >> free_bits)

    def contain(self, address: str) -> bool:
        """Return whether *address* is in one of the networks."""
        return len(self.of(address)) > 1

    def of(self, address: str) -> tuple[int, ...]:
        """Return the class of *address*: equal for two addresses that are in the same networks."""
        if not self._by_length:
            return ()
        parsed = plain_address(address)
        if parsed is None:
            return ()
        bits = int(parsed)
        inside: list[int] = [parsed.version]
        for (version, free_bits), prefixes in self._by_length.items():
            if version == parsed.version and bits >> free_bits in prefixes:
                inside += free_bits, bits >> free_bits
        return tuple(inside)
