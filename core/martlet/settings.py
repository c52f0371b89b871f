"""The core's configuration sections; the store and each plugin define their own."""

from typing import Final, Literal

from martlet.config import Settings, setting

__all__ = ["BrokerConfig", "ClientConfig", "DeliveryConfig", "ServerConfig"]

MIB: Final = 1 << 20


class BrokerConfig(Settings):
    """``[broker]``: who this broker is and what it accepts."""

    data: str = setting("martlet-data", "data directory; relative to the working directory")
    name: str = setting("martlet", "name of the broker in routes; brokers that share topics need different names")
    cluster: str = setting("DefaultCluster", "name of the cluster in routes")
    advertise: str = setting(
        "",
        "host name or address for clients to connect to, if it is not the listening one (NAT, containers)",
    )
    message_bytes_max: int = setting(
        4 * MIB,
        "largest body of a message (maxMessageSize); RocketMQ's clients read no more than about 16 MiB",
        unit="bytes",
        low=1,
        high=128 * MIB,
    )
    auto_create_topics: bool = setting(True, "create a topic when its first message arrives (autoCreateTopicEnable)")
    auto_create_queues: int = setting(
        8, "queues of the template topic TBW102, which is the most that an auto-created topic gets", low=1, high=1024
    )
    auto_create_groups: bool = setting(
        True, "create a consumer group when its first member connects (autoCreateSubscriptionGroup)"
    )
    offsets_max: int = setting(
        500_000,
        "committed offsets, one per group and queue; more are refused; each takes about 100 bytes of memory",
        unit="offsets",
        low=1,
    )
    offsets_persist_ms: int = setting(
        5000,
        "how often changed topics, groups and offsets are written to disk (flushConsumerOffsetInterval)",
        unit="ms",
        low=100,
    )
    native: Literal["auto", "require", "off"] = setting(
        "auto",
        "the native kernel (martlet[native]), which runs the inner loops: auto uses it if it is installed, require "
        "refuses to start without it, off never uses it",
    )


class ServerConfig(Settings):
    """``[server]``: limits of connections and of the memory they use."""

    connections_max: int = setting(
        20_000,
        "open connections of all ports; at the limit, a connection of the address with most connections is closed "
        "if the new one is from an address with fewer",
        low=1,
    )
    connections_address_max: int = setting(
        0, "open connections of one address (a /64 in IPv6) on all ports; more are closed at once; 0: any number", low=0
    )
    connects_address_s: int = setting(
        0,
        "new connections per second of one address, after as many at once (10 at least); more are closed at once; "
        "0: any number",
        low=0,
    )
    unsent_bytes_max: int = setting(
        1 << 20,
        "unsent bytes of one slow connection; above, the broker stops reading from it",
        unit="bytes",
        low=4096,
    )
    unsent_total_bytes_max: int = setting(
        64 << 20,
        "unsent bytes of all connections; above, the broker stops reading from each that has any",
        unit="bytes",
        low=65536,
    )
    incomplete_total_bytes_max: int = setting(
        256 << 20,
        "bytes of incomplete requests of all connections; above, those whose bytes are oldest on average are closed",
        unit="bytes",
        low=65536,
    )
    incomplete_address_bytes_max: int = setting(
        128 << 20,
        "the same for one address (a /64 in IPv6), so that no address uses up the total",
        unit="bytes",
        low=65536,
    )
    collect_bytes: int = setting(
        1 << 18, "bytes delivered to a connection before it is the next one's turn", unit="bytes", low=1024
    )
    peer_tasks_max: int = setting(64, "slow requests in progress per connection; more are refused as busy", low=1)


class DeliveryConfig(Settings):
    """``[delivery]``: limits of message delivery, for all protocols."""

    encoded_bytes: int = setting(
        8 << 20, "cache of encoded batches, shared by the subscribers at the tail of a queue", unit="bytes", low=0
    )
    subscriptions_max: int = setting(100_000, "subscriptions of all connections", low=1)
    shares_max: int = setting(
        20_000, "shared groups in use, counted once per topic; each takes about 10 KB of memory", low=1
    )
    shares_user_max: int = setting(
        15_000,
        "the same for one user, so that others find room; all clients without a name are one user",
        low=1,
    )
    share_members_max: int = setting(1000, "members of one shared group on one topic", low=1)
    share_queues_max: int = setting(
        100_000, "shared groups, counted once per queue, whose state is kept, with members or without", low=1
    )
    share_queues_user_max: int = setting(
        75_000, "the same for those that one user has begun since the broker's start", low=1
    )
    lease_window: int = setting(
        20_000,
        "leased messages per queue and shared group, plus at most as many acknowledged after the oldest of them",
        low=1,
    )
    leases_max: int = setting(200_000, "the same for all queues and groups together", low=1)
    share_memory_s: int = setting(
        600, "how long a group without members stays in memory; its state in the log stays", unit="s", low=0
    )
    sessions_max: int = setting(100_000, "named sessions, which outlive their connections", low=1)
    session_bytes_max: int = setting(
        4 << 20, "size of one session: its filters, plus 100 bytes for each, and its will", unit="bytes", low=1024
    )
    sessions_bytes_max: int = setting(
        256 << 20,
        "the same for all sessions together, also those that end with their connections",
        unit="bytes",
        low=1024,
    )


class ClientConfig(Settings):
    """``[client]``: how commands such as `martlet send` connect to brokers; a broker ignores this section."""

    name_server: str = setting("127.0.0.1:9876", "name server, or several separated by ;")
    tls: bool = setting(False, "encrypt all connections; implied by the four keys below")
    tls_ca: str = setting("", "PEM file with the trusted certificate authorities; empty for the system's")
    tls_cert: str = setting("", "PEM file with the client's certificate chain, if the broker requires one")
    tls_key: str = setting("", "PEM file with the private key; empty if tls_cert contains it")
    tls_insecure: bool = setting(
        False, "accept any server certificate: protects against eavesdropping, not against an impostor"
    )
    access_key: str = setting("", "user that signs requests, for brokers with access control; empty: no signatures")
    secret_file: str = setting("", "file that contains only the secret of this user")
