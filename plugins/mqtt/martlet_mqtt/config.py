"""The configuration section ``[mqtt]``."""

from martlet.config import setting
from martlet.net.ports import PortConfig

__all__ = ["MqttConfig"]


class MqttConfig(PortConfig):
    """The MQTT port and its limits."""

    listen: str = setting(
        "127.0.0.1:1883",
        "where clients connect, also over WebSocket, separated by commas; [::] is all of IPv4 and IPv6, port 0 any "
        "free one",
    )
    topic: str = setting("mqtt", "the topic that has the messages of all names")
    queues: int = setting(8, "its queues when it is created; a name is always in the same one", low=1, high=1024)
    response_prefix: str = setting(
        "response", "response topics of a client that asks for response information begin with it; empty for none"
    )
    server_reference: str = setting(
        "", "server reference for MQTT 5 clients when the broker stops, such as host:1883; empty for none"
    )
    rules: list[str] = setting(
        [],
        "FILTER=TOPIC, FILTER=TOPIC:QUEUES or FILTER=TOPIC:QUEUES:HOURS: names that a topic filter matches are stored "
        "in that topic, which is created with so many queues and keeps messages for so many hours; the first rule that "
        "matches counts",
    )
    origins: list[str] = setting(
        [],
        "web pages that may connect over WebSocket, such as https://example.org, or * for all; always allowed are "
        "those of this machine and of the host that they connect to, and clients that are no browsers",
    )
    connect_s: int = setting(
        10, "a client must connect within this time after its first byte", unit="s", low=1, high=600
    )
    keep_alive_max_s: int = setting(
        3600,
        "a longer keep alive, or none, becomes this one for clients of MQTT 5; those of MQTT 3 keep theirs",
        unit="s",
        low=5,
        high=65_535,
    )
    session_expiry_max_s: int = setting(
        30 * 86_400,
        "sessions end this long after their client left, even if it asked for more; MQTT 3 cannot ask",
        unit="s",
        low=0,
        high=0xFFFF_FFFE,
    )
    shared_expiry_s: int = setting(
        3600, "a shared subscription that no session has any more is forgotten after this time", unit="s", low=0
    )
    packet_bytes_max: int = setting(
        268_435_460,
        "the longest packet, but at most 128 KiB more than broker.message_bytes_max; a longer PUBLISH of MQTT 3 is "
        "acknowledged and dropped, any other packet ends the connection",
        unit="bytes",
        low=1024,
        high=268_435_460,
    )
    connect_bytes_max: int = setting(
        65_536, "the longest CONNECT packet, which comes before the client is known", unit="bytes", low=256
    )
    name_bytes_max: int = setting(4096, "the longest topic name and topic filter", unit="bytes", low=64, high=16_384)
    filters_max: int = setting(
        20_000,
        "topic filters of one session; delivery.session_bytes_max bounds them, too",
        low=1,
    )
    selectors: bool = setting(
        False, "the user property selector of SUBSCRIBE is a condition in SQL92; needs the plugin filter_sql92"
    )
    receive_max: int = setting(
        1024, "messages of QoS 2 that a client may send before it completes the first", low=1, high=65_535
    )
    in_flight_max: int = setting(
        1024, "messages that are sent to a client and not acknowledged; it may ask for fewer", low=1, high=32_767
    )
    sys_interval_s: int = setting(10, "how often metrics are published under $SYS", unit="s", low=1, high=86_400)
    retained_max: int = setting(100_000, "names with a retained message; further ones are refused", low=0)
    retained_bytes_max: int = setting(
        1 << 30, "bytes of retained messages with their properties; further ones are refused", unit="bytes", low=0
    )
    alias_max: int = setting(16, "topic aliases of one client, in each direction", low=0, high=1024)
    client_id_bytes_max: int = setting(1000, "the longest client identifier", unit="bytes", low=23, high=1000)
