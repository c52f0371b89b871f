"""Classes of addresses: which of the networks that rules name contain an address."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import final

from martlet.contracts import Network

__all__ = ["AddressClasses", "plain_address"]


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
