"""Networks in configuration and rules, and the addresses that they contain."""

from ipaddress import ip_network

import pytest

from martlet.access.networks import AddressClasses, parse_network, parse_networks
from martlet.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("10.1.2.3", "10.1.2.3/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("fd00::/8", "fd00::/8"),
        ("2001:db8::7", "2001:db8::7/128"),
        ("::/0", "::/0"),
    ],
)
def test_an_address_or_a_network_is_read(text: str, network: str) -> None:
    assert parse_network(text) == ip_network(network)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no address such as"),
        ("localhost", "is no address such as"),
        ("10.0.0.0/33", "is no address such as"),
        ("10.0.0.0/255.0.0.0", "has no number after the slash"),
        ("10.0.0.0/", "has no number after the slash"),
        ("10.0.0/8", "is no address such as"),
        ("10.0.0.1:80", "is no address such as"),
        ("fe80::1%eth0", "names an interface"),
        ("::ffff:10.0.0.0/104", "write 10.0.0.0/8"),
        (" 10.0.0.0/8", "is no address such as"),
    ],
)
def test_another_text_is_an_error_that_says_what_to_write(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_network(text)
    with pytest.raises(ConfigError, match=rf"config key 'mqtt\.networks': network .*{why}"):
        parse_networks("mqtt.networks", ["10.0.0.0/8", text])


def test_addresses_are_in_networks_of_their_family() -> None:
    networks = AddressClasses(parse_networks("mqtt.networks", ["10.0.0.0/8", "192.0.2.7", "2001:db8::/32"]))
    for address in "10.255.0.1", "192.0.2.7", "2001:db8:1::1", "::ffff:10.0.0.1":
        assert networks.contain(address), address
    for address in "11.0.0.1", "192.0.2.8", "2001:db9::1", "::ffff:11.0.0.1", "", "peer-0", "::a00:1":
        assert not networks.contain(address), address
    assert AddressClasses(parse_networks("mqtt.networks", ["0.0.0.0/0"])).contain("8.8.8.8")
    assert not AddressClasses(parse_networks("mqtt.networks", ["0.0.0.0/0"])).contain("::1")
    assert not AddressClasses(()).contain("10.0.0.1")
    assert AddressClasses(parse_networks("mqtt.networks", ["fe80::/10"])).contain("fe80::7%eth0")
