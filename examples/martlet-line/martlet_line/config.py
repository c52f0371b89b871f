"""The keys of the ``[line]`` section: the port, and the limits of a client."""

from martlet.config import setting
from martlet.net.ports import PortConfig

__all__ = ["LineConfig"]


class LineConfig(PortConfig):
    """How the line protocol is served."""

    listen: str = setting("127.0.0.1:10920", "where netcat connects; port 0 is any free one")
    line_bytes_max: int = setting(65536, "the longest line; larger bodies are sent with PUT", unit="bytes", low=256)
    body_bytes_max: int = setting(4 << 20, "the largest body that PUT may announce", unit="bytes", low=1)
    words_max: int = setting(64, "words of one command, including properties", low=8)
    idle_s: int = setting(
        600,
        "after this silence a client gets a PING, and after twice as long it is disconnected; 0 for never",
        unit="s",
        low=0,
    )
    subscriptions_max: int = setting(100, "subscriptions of one connection", low=1)
    credit_default: int = setting(1000, "messages that a client gets before it sends CREDIT", low=0)
    credit_max: int = setting(10_000_000, "credit that one subscription can gather", low=1)
    lease_default_s: int = setting(
        30, "how long a member may hold a message of a group without acknowledging it", unit="s", low=1
    )
    lease_max_s: int = setting(3600, "the longest lease a member may ask for", unit="s", low=1)
    nack_delay_max_ms: int = setting(3_600_000, "the longest delay that NACK may ask for", unit="ms", low=0)
    ack_range_max: int = setting(10_000, "messages that one ACK of a group may settle", low=1)
    session_expiry_s: int = setting(
        604_800, "a durable name that nobody uses for so long is forgotten, with its cursors", unit="s", low=1
    )
    new_topic_queues: int = setting(1, "queues of a topic that a client's first PUB or SUB creates", low=1, high=64)
