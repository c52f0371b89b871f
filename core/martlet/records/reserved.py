"""The names of properties that are not for users."""

from typing import Final

__all__ = ["BODY_BYTES", "OF_PROTOCOLS", "PAST", "PAST_PREFIXES", "RESERVED"]

# Properties that brokers and clients write; a user's property with such a name would change their behaviour.
RESERVED: Final = frozenset(
    (
        "KEYS",
        "TAGS",
        "WAIT",
        "DELAY",
        "RETRY_TOPIC",
        "REAL_TOPIC",
        "REAL_QID",
        "TRAN_MSG",
        "PGROUP",
        "MIN_OFFSET",
        "MAX_OFFSET",
        "ORIGIN_MESSAGE_ID",
        "RECONSUME_TIME",
        "MAX_RECONSUME_TIMES",
        "MSG_REGION",
        "TRACE_ON",
        "UNIQ_KEY",
        "EXTEND_UNIQ_INFO",
        "CONSUME_START_TIME",
        "INNER_NUM",
        "INNER_BASE",
        "DUP_INFO",
        "TRAN_PREPARED_QUEUE_OFFSET",
        "__transactionId__",
        "TRANSACTION_CHECK_TIMES",
        "CLUSTER",
        "CORRELATION_ID",
        "REPLY_TO_CLIENT",
        "TTL",
        "MSG_TYPE",
        "ARRIVE_TIME",
        "PUSH_REPLY_TIME",
        "POP_CK",
        "POP_CK_OFFSET",
        "1ST_POP_TIME",
        "TIMER_DELAY_SEC",
        "TIMER_DELAY_MS",
        "TIMER_DELIVER_MS",
        "TIMER_CRON",
        "TIMER_PERIOD_MS",
        "TIMER_REPEAT",
        "TIMER_OUT_MS",
        "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS",
        "TIMER_ROLL_TIMES",
        "TIMER_DEL_UNIQKEY",
        "__CRC32#",
    )
)
# Properties of earlier deliveries, of a delay and of a transaction that are over; a message that is sent again starts
# without them.
PAST: Final = frozenset(
    (
        "DELAY",
        "RECONSUME_TIME",
        "MAX_RECONSUME_TIMES",
        "DLQ_ORIGIN_TOPIC",
        "DLQ_ORIGIN_MESSAGE_ID",
        "TRAN_MSG",
        "PGROUP",
        "__transactionId__",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "REAL_TOPIC",
        "REAL_QID",
    )
)
PAST_PREFIXES: Final = ("TIMER_", "TRANSACTION_", "TRAN_PREPARED_")
# Properties for fields of messages of MQTT and STOMP other than the body and users' properties. Each of these protocols
# understands some of them, and shows none of them to users.
OF_PROTOCOLS: Final = frozenset(
    (
        "CONTENT_TYPE",
        "EXPIRES_MS",
        "REPLY_TO",
        "MQTT_BLOCK",
        "MQTT_CLIENT",
        "MQTT_PAYLOAD_BYTES",
        "MQTT_QOS",
        "MQTT_RETAIN",
        "MQTT_UTF8",
        "STOMP_BLOCK",
        "STOMP_BODY_BYTES",
        "STOMP_REPLY_TO",
    )
)
# Properties with the size of the body, if the protocol stored fields after it that were too long for properties.
BODY_BYTES: Final = ("MQTT_PAYLOAD_BYTES", "STOMP_BODY_BYTES")
