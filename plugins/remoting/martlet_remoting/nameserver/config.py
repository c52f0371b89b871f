"""The configuration section ``[nameserver]``."""

from martlet.config import setting
from martlet.net.ports import PortConfig

__all__ = ["NameServerConfig"]


class NameServerConfig(PortConfig):
    """The name server, which clients ask for the brokers of a topic."""

    listen: str = setting(
        "127.0.0.1:9876",
        "where clients connect, separated by commas; [::] is all of IPv4 and IPv6, port 0 any free one",
    )
    scan_s: int = setting(5, "how often to look for silent brokers", unit="s", low=1, high=600)
    broker_timeout_s: int = setting(
        120,
        "a broker is removed after this time without registration, unless it registered with its own time limit",
        unit="s",
        low=1,
    )
    idle_s: int = setting(120, "a connection is closed after this time without requests", unit="s", low=1, high=86_400)
    frame_bytes_max: int = setting(
        16_777_216,
        "largest frame, as in RocketMQ; a larger one closes the connection",
        unit="bytes",
        low=65_536,
        high=1 << 30,
    )
    brokers_max: int = setting(10_000, "more brokers are refused", unit="brokers", low=1)
    topics_max: int = setting(
        1_000_000,
        "topics of all brokers, each counted once per broker; above, new topics get no route",
        unit="topics",
        low=1,
    )
    broker_topics_max: int = setting(
        100_000,
        "topics per broker; a registration with more is refused; a Martlet broker has at most 80,000",
        unit="topics",
        low=1,
    )
    order_messages: bool = setting(False, "answer routes with the topic's ORDER_TOPIC_CONFIG (orderMessageEnable)")
    return_order_topics: bool = setting(
        True, "answer registrations with ORDER_TOPIC_CONFIG (returnOrderTopicConfigToBroker)"
    )
    topic_lists: bool = setting(True, "answer lists of topics (enableAllTopicList, enableTopicList)")
    acting_master: bool = setting(
        False, "if a master is lost, its slave with the lowest id acts as master for reads (supportActingMaster)"
    )
    drop_missing_topics: bool = setting(
        False, "a registration removes the broker's other topics (deleteTopicWithBrokerRegistration)"
    )
