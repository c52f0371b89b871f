"""Refuses delayed and half messages while no plugin holds them: stored as usual, they would be delivered at once."""

from typing import TYPE_CHECKING, Final

from martlet.contracts import Stage
from martlet.errors import Reason, Refused
from martlet.message import Message, find_property
from martlet.tables.topics import BROKER_TOPICS, RETRY_PREFIX
from martlet_remoting.handlers.context import supports_delays, supports_transactions

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["TIMER_KEYS", "no_external_transactions", "no_transactions", "refuse_unheld"]

TIMER_KEYS: Final = (
    "TIMER_DELIVER_MS",
    "TIMER_DELAY_SEC",
    "TIMER_DELAY_MS",
    "TIMER_CRON",
    "TIMER_PERIOD_MS",
    "TIMER_REPEAT",
)


def refuse_unheld(broker: "Broker") -> Stage:
    """Return the stage that refuses delayed and transactional messages, unless a plugin supports them.

    A retry with a delay is always accepted: `retries` delays it, although for a shorter time.
    """

    def check(message: Message) -> Message:
        if message.topic in BROKER_TOPICS:
            return message  # a plugin has stored the message in this topic to deliver it later
        level = message.property("DELAY")
        delayed = level.isdigit() and level.lstrip("0") != ""
        if not supports_delays(broker) and not message.topic.startswith(RETRY_PREFIX):
            timers = [key for key in TIMER_KEYS if message.property(key)]
            if delayed or timers:
                name = timers[0] if timers else "DELAY"
                text = f"message has the property {name}, and this broker does not support delayed messages"
                raise Refused(Reason.ILLEGAL, f"{text}; add the plugin timer to plugins.enabled")
        half = find_property(message.properties, b"TRAN_MSG").lower() == b"true"
        if half and not (delayed and message.reconsume_times > 0) and not supports_transactions(broker):
            raise no_transactions(broker)
        return message

    return Stage(check, properties=("DELAY", *TIMER_KEYS, "TRAN_MSG"))


def no_transactions(broker: "Broker") -> Refused:
    text = f"the broker[{broker.config.name}] sending transaction message is forbidden"
    return Refused(Reason.NO_PERMISSION, f"{text}; add the plugin tx to plugins.enabled")


def no_external_transactions(broker: "Broker") -> Refused:
    text = f"the broker[{broker.config.name}] does not support external transactions"
    return Refused(Reason.NO_PERMISSION, f"{text}; add the plugin tx to plugins.enabled")
