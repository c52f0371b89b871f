"""The keys of ``[remoting]``: the port, TLS and the limits."""

from dataclasses import dataclass
from typing import Literal

from martlet.config import setting

__all__ = ["RemotingConfig"]


@dataclass(frozen=True, slots=True)
class RemotingConfig:
    """How RocketMQ remoting clients are served."""

    listen: str = setting("127.0.0.1:10911", "where clients connect; port 0 is any free one")
    vip: bool = setting(
        True, "also listen on the port two below, where clients up to 4.4 send all but pulls; not with port 0"
    )
    region: str = setting("DefaultRegion", "MSG_REGION of every message; trace data is grouped by it")
    trace: bool = setting(True, "tell producers and consumers that they may send trace messages")
    nameservers: list[str] = setting(
        [], "name servers elsewhere to register with, HOST:PORT each; the one in this process is told anyway"
    )
    nameservers_tls: bool = setting(
        False, "encrypt connections to name servers elsewhere; implied by the four keys below"
    )
    nameservers_tls_ca: str = setting("", "PEM file of the authorities to trust; empty for those of the system")
    nameservers_tls_cert: str = setting(
        "", "PEM file with the certificate chain to present, where a name server asks for one"
    )
    nameservers_tls_key: str = setting("", "PEM file with its private key; empty if the chain's file holds it")
    nameservers_tls_insecure: bool = setting(False, "accept any certificate: nobody can listen, but anybody can answer")
    register_s: int = setting(30, "how often name servers are told that we are alive", unit="s", low=1, high=60)
    register_timeout_s: int = setting(
        120, "name servers drop us when we are silent for so long", unit="s", low=2, high=3600
    )
    idle_s: int = setting(
        120, "a silent connection is closed; clients heartbeat every 30", unit="s", low=1, high=86_400
    )
    client_expiry_s: int = setting(
        120, "a client without a heartbeat for so long leaves its groups", unit="s", low=1, high=86_400
    )
    frame_bytes_max: int = setting(
        16_777_216, "a larger frame closes the peer; as in RocketMQ", unit="bytes", low=65_536, high=1 << 30
    )
    pull_messages_max: int = setting(
        1024, "one pull answer holds no more; Java clients ask for 32 to 1024", unit="messages", low=1, high=4096
    )
    pull_bytes_max: int = setting(
        262_144,
        "one pull answer stops before the message that crosses it, unless the pull names another size",
        unit="bytes",
        low=1,
        high=8_388_608,
    )
    pull_bytes_asked_max: int = setting(
        4_194_304,
        "the largest size that a pull may name; four answers of a connection may wait for their reader",
        unit="bytes",
        low=1,
        high=8_388_608,
    )
    suspend_ms_max: int = setting(
        60_000, "no pull is held longer; clients give up after 30 s", unit="ms", low=1, high=3_600_000
    )
    parked_max: int = setting(
        100_000,
        "pulls that wait, of all connections, where an expression counts as one for 64 characters; "
        "for more, those with the largest share are answered SYSTEM_BUSY",
        unit="pulls",
        low=1,
    )
    parked_peer_max: int = setting(
        4096, "the same of one connection; more are answered SYSTEM_BUSY", unit="pulls", low=1
    )
    unflushed_bytes_max: int = setting(
        134_217_728, "bytes that wait for the disk; more sends are answered SYSTEM_BUSY", unit="bytes", low=1_048_576
    )
    groups_peer_max: int = setting(
        1024, "groups one connection may belong to; a heartbeat with more is refused", unit="groups", low=1
    )
    subscribed_chars_peer_max: int = setting(
        1_048_576,
        "topics and expressions of the groups one connection may belong to; a heartbeat with more is refused",
        unit="characters",
        low=65_536,
    )
    requests_peer_max: int = setting(
        256, "requests to one client that wait for its answer; more fail at once", unit="requests", low=1
    )
    relay_timeout_ms: int = setting(
        10_000, "a relayed request to a client is given up after this", unit="ms", low=100, high=600_000
    )
    lock_s: int = setting(
        60, "an ordered consumer's queue lock ends so long after its last renewal", unit="s", low=1, high=3600
    )
    locks_peer_max: int = setting(
        16_384, "queues that the ordered consumers of one connection hold; more are refused", unit="queues", low=1
    )
    tls: Literal["disabled", "permissive", "enforcing"] = setting(
        "permissive", "with a certificate: TLS refused, TLS beside plain on the same port, or TLS only"
    )
    tls_cert: str = setting("", "PEM file with the certificate chain; empty for no TLS")
    tls_key: str = setting("", "PEM file with its private key; empty if the chain's file holds it")
    tls_client_ca: str = setting(
        "", "PEM file with the authorities that client certificates must come from; empty asks none"
    )
