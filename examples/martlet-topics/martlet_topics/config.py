"""The keys of the ``[topics]`` section."""

from martlet.config import Settings, setting
from martlet_topics.codec import WINDOW_MAX

__all__ = ["TopicsConfig"]


class TopicsConfig(Settings):
    """How the protocol is served."""

    listen: str = setting("127.0.0.1:10940", "where clients connect; port 0 is any free one")
    topic: str = setting("topics", "the topic that holds all messages")
    queues: int = setting(8, "its queues when it is created; a name always goes to the same one", low=1, high=64)
    window: int = setting(500, "messages of a session that are sent and not acknowledged", low=1, high=WINDOW_MAX)
    line_bytes_max: int = setting(4096, "the longest line of a command", unit="bytes", low=256)
    run_bytes_max: int = setting(8 << 20, "the messages of one RUN or TX together", unit="bytes", low=1024)
    run_messages_max: int = setting(1000, "messages in one RUN or TX", low=1, high=65535)
    name_bytes_max: int = setting(1024, "names of messages", unit="bytes", low=1, high=8192)
    filters_max: int = setting(1000, "filters of one session", low=1)
    lease_s: int = setting(
        30, "a shared message that is not acknowledged for so long goes to another client", unit="s", low=1
    )
    session_expiry_s: int = setting(604_800, "a session whose client stays away for so long ends", unit="s", low=1)
    idle_s: int = setting(600, "a client that is silent for so long is disconnected; 0 for never", unit="s", low=0)
