"""The configuration section ``[stomp]``."""

from dataclasses import dataclass

from martlet.config import setting

from .codec import Limits

__all__ = ["StompConfig"]


@dataclass(frozen=True, slots=True)
class StompConfig:
    """The STOMP port and its limits."""

    listen: str = setting("127.0.0.1:61613", "where clients connect, also over WebSocket; port 0 is any free one")
    connect_s: int = setting(
        10, "a client must connect within this time after its first byte", unit="s", low=1, high=600
    )
    connect_bytes_max: int = setting(
        65_536, "the longest CONNECT frame, which comes before the client is known", unit="bytes", low=1024
    )
    frame_bytes_max: int = setting(
        (4 << 20) + 65_536,
        "a client that sends a longer frame is disconnected; header lines are part of it",
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

    def limits(self) -> Limits:
        """Return what the connections of clients must observe."""
        return Limits(
            self.connect_bytes_max,
            self.frame_bytes_max,
            self.head_bytes_max,
            self.headers_max,
            self.header_bytes_max,
            self.connect_s,
        )
