"""What can be set of the core itself; each part of the store and each plugin has a record of its own.

Apart from the modules that use them, because these are compiled where that is wanted, and the compiler knows no
dataclass whose defaults are descriptors.
"""

from dataclasses import dataclass
from typing import Final

from martlet.config import setting

__all__ = ["BrokerConfig", "ClientConfig", "DeliveryConfig", "ServerConfig"]

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """``[broker]``: who this broker is and what it accepts."""

    data: str = setting("martlet-data", "the folder that holds everything; relative to where the broker is started")
    name: str = setting("martlet", "the broker's name in routes; brokers that share topics need different names")
    cluster: str = setting("DefaultCluster", "the cluster's name in routes")
    advertise: str = setting(
        "",
        "the host clients shall connect to, where it is not the listening one (NAT, containers); name or address",
    )
    message_bytes_max: int = setting(
        4 * MIB, "the largest body; RocketMQ's maxMessageSize", unit="bytes", low=1, high=12 * MIB
    )
    auto_create_topics: bool = setting(
        True, "create a topic when the first message for it comes (autoCreateTopicEnable)"
    )
    auto_create_queues: int = setting(
        8, "queues of the template TBW102; a topic gets at most so many", low=1, high=1024
    )
    auto_create_groups: bool = setting(
        True, "create a consumer group when it first appears (autoCreateSubscriptionGroup)"
    )
    offsets_max: int = setting(
        500_000,
        "committed offsets, one a group and queue; more are refused. Each takes about 100 bytes of memory",
        unit="offsets",
        low=1,
    )
    offsets_persist_ms: int = setting(
        5000,
        "how often changed topics, groups and offsets go to the disk; RocketMQ's flushConsumerOffsetInterval",
        unit="ms",
        low=100,
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """``[server]``: limits of what peers may hold."""

    connections_max: int = setting(
        20_000,
        "connections at once, over all ports; above, the address with the most gives one up for one with fewer",
        low=1,
    )
    unsent_bytes_max: int = setting(
        1 << 20, "answers waiting for one slow peer; above, it is not read from", unit="bytes", low=4096
    )
    unsent_total_bytes_max: int = setting(
        64 << 20, "the same over all peers; above, every peer with waiting answers pauses", unit="bytes", low=65536
    )
    incomplete_total_bytes_max: int = setting(
        256 << 20,
        "incomplete requests of all connections; above, those close whose bytes have waited longest on average",
        unit="bytes",
        low=65536,
    )
    incomplete_address_bytes_max: int = setting(
        128 << 20,
        "the same of all connections from one address (of IPv6 a /64), so that none uses up what is for all",
        unit="bytes",
        low=65536,
    )
    collect_bytes: int = setting(1 << 18, "what one wake-up delivers to a peer at most", unit="bytes", low=1024)
    peer_tasks_max: int = setting(64, "slow requests under way for one peer; more are refused as busy", low=1)


@dataclass(frozen=True, slots=True)
class DeliveryConfig:
    """``[delivery]``: limits of pushing messages, whatever the protocol."""

    encoded_bytes: int = setting(
        8 << 20, "encoded batches that subscribers at the tail of a queue share", unit="bytes", low=0
    )
    subscriptions_max: int = setting(100_000, "subscriptions at once, over all peers", low=1)
    shares_max: int = setting(1000, "topics times groups whose members compete for messages", low=1)
    share_members_max: int = setting(1000, "members of one shared group on one topic", low=1)
    lease_window: int = setting(
        1000, "messages of one queue that are out with a shared group's members, or acknowledged behind one", low=1
    )
    leases_max: int = setting(200_000, "the same over all queues and groups", low=1)
    share_memory_s: int = setting(
        600, "how long a group without members remembers what was settled above its committed offset", unit="s", low=0
    )
    sessions_max: int = setting(10_000, "named sessions that outlive their sockets", low=1)
    session_subscriptions_max: int = setting(100, "durable subscriptions of one session", low=1)
    session_expiry_s: int = setting(
        7 * 86_400, "a session whose peer stays away so long is forgotten, with its cursors", unit="s", low=1
    )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """``[client]``: how commands such as `martlet send` reach the brokers; a broker ignores it."""

    name_server: str = setting("127.0.0.1:9876", "the name server to ask, several separated by ;")
    tls: bool = setting(False, "encrypt every connection; implied by the four keys below")
    tls_ca: str = setting("", "PEM file of the authorities to trust; empty for those of the system")
    tls_cert: str = setting("", "PEM file with the certificate chain to present, where the broker asks for one")
    tls_key: str = setting("", "PEM file with its private key; empty if the chain's file holds it")
    tls_insecure: bool = setting(False, "accept any certificate: nobody can listen, but anybody can answer")
    access_key: str = setting("", "user to sign requests as, where brokers know their users; empty to sign none")
    secret_file: str = setting("", "file that holds the secret of this user and nothing else")
