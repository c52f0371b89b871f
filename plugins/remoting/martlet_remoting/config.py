"""The configuration section ``[remoting]``."""

from typing import Literal

from martlet.config import setting
from martlet.net.ports import PortConfig

__all__ = ["RemotingConfig"]


class RemotingConfig(PortConfig):
    """The protocol of RocketMQ's clients (remoting)."""

    listen: str = setting(
        "127.0.0.1:10911",
        "where clients connect, separated by commas; they learn the first one; [::] is all of IPv4 and IPv6, port 0 "
        "any free one",
    )
    vip: bool = setting(
        True,
        "also listen two ports below, where clients up to 4.4 send everything except pulls",
    )
    region: str = setting("DefaultRegion", "property MSG_REGION of every message, which groups trace data")
    acl_errors: Literal["2.0", "1.0"] = setting(
        "2.0",
        "the code of refusals for a missing permission or a wrong signature: 16 as in RocketMQ's ACL 2.0, or 1 as in "
        "ACL 1.0; clients and tools up to 5.2 may expect that",
    )
    trace: bool = setting(True, "allow producers and consumers to send trace messages")
    nameservers: list[str] = setting(
        [], "remote name servers to register with, each HOST:PORT; the one in this process is always included"
    )
    nameservers_tls: bool = setting(False, "encrypt connections to remote name servers; implied by the four keys below")
    nameservers_tls_ca: str = setting("", "PEM file with the trusted certificate authorities; empty for the system's")
    nameservers_tls_cert: str = setting(
        "", "PEM file with the client's certificate chain, if a name server requires one"
    )
    nameservers_tls_key: str = setting("", "PEM file with the private key; empty if nameservers_tls_cert contains it")
    nameservers_tls_insecure: bool = setting(
        False, "accept any server certificate: protects against eavesdropping, not against an impostor"
    )
    nameservers_key: str = setting(
        "", "access key with which this broker signs its requests to remote name servers; empty: unsigned"
    )
    nameservers_secret_file: str = setting(
        "", "file with the secret of nameservers_key, closed to other users (chmod o=); read again at SIGHUP"
    )
    register_s: int = setting(30, "how often to register with the name servers", unit="s", low=1, high=60)
    register_timeout_s: int = setting(
        120, "name servers remove this broker after this time without registration", unit="s", low=2, high=3600
    )
    idle_s: int = setting(
        120,
        "a connection is closed after this time without requests; clients send a heartbeat every 30 s",
        unit="s",
        low=1,
        high=86_400,
    )
    client_expiry_s: int = setting(
        120, "a client is removed from its groups after this time without a heartbeat", unit="s", low=1, high=86_400
    )
    light_queues: bool = setting(
        False,
        "enableLmq and enableMultiDispatch: index messages in the light queues that INNER_MULTI_DISPATCH names; "
        "they are stored one by one then, not the sends of a read together",
    )
    frame_bytes_max: int = setting(
        16_777_216,
        "largest frame, as in RocketMQ; a larger one closes the connection",
        unit="bytes",
        low=65_536,
        high=1 << 30,
    )
    pull_messages_max: int = setting(
        1024, "messages in one pull answer; Java clients request 32 to 1024", unit="messages", low=1, high=4096
    )
    pull_bytes_max: int = setting(
        262_144,
        "size of one pull answer, unless the request specifies another size",
        unit="bytes",
        low=1,
        high=8_388_608,
    )
    pull_bytes_asked_max: int = setting(
        4_194_304,
        "largest size that a pull request can specify; a connection can have four unsent answers",
        unit="bytes",
        low=1,
        high=8_388_608,
    )
    cold_tier_bytes_max: int = setting(
        167_772_160,
        "bytes that a group pulls from the cold tier in 5 s, unless updateColdDataFlowCtrGroupConfig gave it a limit; "
        "above, its pulls are answered SYSTEM_BUSY; rebuilding 32 MiB/s of it takes a tenth of a core; 0: no limit",
        unit="bytes",
        low=0,
    )
    bulk_frame_bytes: int = setting(
        262_144,
        "size of one frame of a bulk read; ordinary consumers wait for the one that is being sent",
        unit="bytes",
        low=4096,
        high=8_388_608,
    )
    bulk_bytes_max: int = setting(
        67_108_864, "largest credit of a bulk read; its reader then asks again", unit="bytes", low=65_536, high=1 << 40
    )
    bulk_reads_max: int = setting(
        20_000,
        "unfinished bulk reads of all connections, counted as for a connection; above, those of the connection with "
        "the most are answered SYSTEM_BUSY",
        unit="reads",
        low=1,
    )
    bulk_reads_peer_max: int = setting(
        128,
        "unfinished bulk reads per connection; each 2048 characters of an expression count as one more; more are "
        "answered SYSTEM_BUSY; Spark sends 8, whose expressions can have any length",
        unit="reads",
        low=1,
    )
    suspend_ms_max: int = setting(
        60_000, "longest wait of a pull; clients give up after 30 s", unit="ms", low=1, high=3_600_000
    )
    parked_max: int = setting(
        100_000,
        "waiting pulls of all connections; each 64 characters of an expression count as one more; "
        "above, those of the connection with the most are answered SYSTEM_BUSY",
        unit="pulls",
        low=1,
    )
    parked_peer_max: int = setting(
        4096,
        "waiting pulls per connection, more are answered SYSTEM_BUSY; and as many pops, more are answered POLLING_FULL",
        unit="pulls",
        low=1,
    )
    pops_waiting_max: int = setting(
        100_000, "waiting pops of all connections; more are answered POLLING_FULL", unit="pops", low=1
    )
    pops_line_max: int = setting(
        1024, "waiting pops of one group for one queue, or for any; more are answered POLLING_FULL", unit="pops", low=1
    )
    unflushed_bytes_max: int = setting(
        134_217_728,
        "bytes waiting to be flushed; above, sends are answered SYSTEM_BUSY",
        unit="bytes",
        low=1_048_576,
    )
    groups_peer_max: int = setting(
        1024, "groups per connection; a heartbeat with more is refused", unit="groups", low=1
    )
    subscribed_chars_peer_max: int = setting(
        1_048_576,
        "total length of the topics and expressions that a connection subscribes to; a heartbeat with more is refused",
        unit="characters",
        low=65_536,
    )
    requests_peer_max: int = setting(
        256, "requests to a client without an answer yet, per connection; more fail immediately", unit="requests", low=1
    )
    relay_timeout_ms: int = setting(
        10_000, "time limit of a request relayed to a client", unit="ms", low=100, high=600_000
    )
    request_mode: Literal["PULL", "POP"] = setting(
        "PULL", "how consumers with setClientRebalance(false) get messages, unless `mqadmin setConsumeMode` says it"
    )
    lock_s: int = setting(
        60, "an ordered consumer's lock on a queue expires this long after its last renewal", unit="s", low=1, high=3600
    )
    locks_peer_max: int = setting(
        16_384, "queues locked by the ordered consumers of one connection; more are refused", unit="queues", low=1
    )
