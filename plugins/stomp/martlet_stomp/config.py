"""The configuration section ``[stomp]``."""

from typing import Final

from martlet.config import setting
from martlet.net.ports import PortConfig
from martlet_stomp.wire.codec import Limits

__all__ = ["StompConfig"]

# Room in a frame beside the body: the default limit of the header lines.
BESIDE_BODY_BYTES: Final = 65_536


class StompConfig(PortConfig):
    """The STOMP port and its limits."""

    listen: str = setting(
        "127.0.0.1:61613",
        "where clients connect, also over WebSocket, separated by commas; [::] is all of IPv4 and IPv6, port 0 any "
        "free one",
    )
    queues: int = setting(
        1, "queues of a topic that a client creates; with one, its messages are in one order", low=1, high=1024
    )
    names: list[str] = setting(
        ["mqtt"], "topics whose messages have names, as those of MQTT: /topic/mqtt/home/door is home/door in topic mqtt"
    )
    prefetch: int = setting(
        1000,
        "messages that a subscription may hold unacknowledged, unless it asks for another number",
        low=1,
        high=100_000,
    )
    redeliveries_max: int = setting(
        6, "after so many redeliveries a message that a client refuses (NACK) becomes a dead letter", low=0, high=1000
    )
    dead_letters: str = setting("stomp_dead_letters", "the topic of dead letters; empty to drop such messages")
    queue_expiry_s: int = setting(
        3600,
        "a queue without consumers in which nothing waits is forgotten after this time; with auto-delete:true at once, "
        "and after this time with what waits",
        unit="s",
        low=1,
    )
    temporary: str = setting("stomp_temp", "the topic with the messages to temporary queues and topics")
    transactions_max: int = setting(16, "transactions of one connection that have not ended", low=1, high=1000)
    transaction_frames_max: int = setting(
        900, "frames of a transaction; store.group_messages_max bounds them, too", low=1, high=100_000
    )
    transaction_bytes_max: int = setting(
        8 << 20, "size of all transactions of one connection, plus 256 bytes for each frame", unit="bytes", low=1024
    )
    transactions_user_bytes_max: int = setting(
        64 << 20, "the same for all connections of a user, or of an address without one", unit="bytes", low=1024
    )
    transactions_bytes_max: int = setting(256 << 20, "the same for all connections together", unit="bytes", low=65_536)
    transaction_s: int = setting(
        900, "a transaction must end within this time, or its connection is closed", unit="s", low=1, high=86_400
    )
    subscriptions_max: int = setting(1000, "subscriptions of one connection", low=1, high=100_000)
    origins: list[str] = setting(
        [],
        "web pages that may connect over WebSocket, such as https://example.org, or * for all; always allowed are "
        "those of this machine and of the host that they connect to, and clients that are no browsers",
    )
    connect_s: int = setting(
        10, "a client must connect within this time after its first byte", unit="s", low=1, high=600
    )
    connect_bytes_max: int = setting(
        65_536, "the longest CONNECT frame, which comes before the client is known", unit="bytes", low=1024
    )
    frame_bytes_max: int = setting(
        256 << 20,
        "a client that sends a longer frame is disconnected; header lines are part of it; at most 64 KiB more than "
        "broker.message_bytes_max",
        unit="bytes",
        low=1024,
        high=256 << 20,
    )
    headers_max: int = setting(100, "header lines of a frame", low=10, high=1000)
    header_bytes_max: int = setting(8192, "the longest header line", unit="bytes", low=256, high=65_536)
    head_bytes_max: int = setting(
        65_536, "the header lines of a frame with its command", unit="bytes", low=8192, high=1 << 20
    )
    heartbeat_min_ms: int = setting(
        500, "the broker neither sends nor expects heart-beats more often", unit="ms", low=10, high=60_000
    )

    def limits(self, body_bytes_max: int) -> Limits:
        """Return the limits of clients' connections for messages of at most *body_bytes_max*."""
        return Limits(
            self.connect_bytes_max,
            min(self.frame_bytes_max, body_bytes_max + BESIDE_BODY_BYTES),
            self.head_bytes_max,
            self.headers_max,
            self.header_bytes_max,
            self.connect_s,
        )
