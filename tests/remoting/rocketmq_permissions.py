"""What RocketMQ 5.5.0 asks its access control for each of the requests in `test_permission`.

From its classes: DefaultAuthorizationContextBuilder.build, which knows 16 codes, and the annotations RocketMQAction and
RocketMQResource of the headers, by which it asks about all others. It asks nothing for a code without a header of its
own, and nothing if the header has no field with a resource, unless the action is about the cluster.
"""

from collections.abc import Mapping
from typing import Final

from martlet_remoting.wire.codes import RequestCode

__all__ = ["ASKED_BY_ROCKETMQ"]

PUBLISH = "publish topic:T"
GET_TOPIC, GET_GROUP = "get topic:T", "get group:G"
READ = ["subscribe group:G", "subscribe topic:T"]
CREATE_TOPIC = "create topic:T"
GET_CLUSTER, UPDATE_CLUSTER = "get cluster", "update cluster"

# Codes that are not here: nothing is asked.
ASKED_BY_ROCKETMQ: Final[Mapping[int, list[str]]] = {
    RequestCode.SEND_MESSAGE: [PUBLISH],
    RequestCode.SEND_MESSAGE_V2: [PUBLISH],
    RequestCode.SEND_BATCH_MESSAGE: [PUBLISH],
    RequestCode.RECALL_MESSAGE: [PUBLISH],
    RequestCode.PULL_MESSAGE: READ,
    RequestCode.POP_MESSAGE: READ,
    RequestCode.NOTIFICATION: READ,
    RequestCode.PEEK_MESSAGE: READ,
    RequestCode.POLLING_INFO: [GET_GROUP, GET_TOPIC],
    RequestCode.ACK_MESSAGE: READ,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: READ,
    RequestCode.CONSUMER_SEND_MSG_BACK: ["subscribe group:G"],
    RequestCode.QUERY_MESSAGE: ["subscribe|get topic:T"],
    RequestCode.VIEW_MESSAGE_BY_ID: [GET_TOPIC],
    RequestCode.QUERY_CONSUMER_OFFSET: ["subscribe|get group:G", "subscribe|get topic:T"],
    RequestCode.UPDATE_CONSUMER_OFFSET: ["subscribe|update group:G", "subscribe|update topic:T"],
    RequestCode.GET_MAX_OFFSET: [GET_TOPIC],
    RequestCode.GET_MIN_OFFSET: [GET_TOPIC],
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: [GET_TOPIC],
    RequestCode.GET_EARLIEST_MSG_STORETIME: [GET_TOPIC],
    RequestCode.HEART_BEAT: READ,
    RequestCode.UNREGISTER_CLIENT: ["subscribe group:G"],
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: ["subscribe|get group:G"],
    RequestCode.LOCK_BATCH_MQ: READ,
    RequestCode.UNLOCK_BATCH_MQ: READ,
    RequestCode.UPDATE_AND_CREATE_TOPIC: [CREATE_TOPIC],
    RequestCode.DELETE_TOPIC_IN_BROKER: ["delete topic:T"],
    RequestCode.DELETE_SUBSCRIPTIONGROUP: ["delete group:G"],
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: ["update group:G", "update topic:T"],
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: ["update group:G", "update topic:T"],
    RequestCode.CLONE_GROUP_OFFSET: ["update group:G"],
    RequestCode.GET_CONSUMER_RUNNING_INFO: [GET_GROUP],
    RequestCode.CONSUME_MESSAGE_DIRECTLY: READ,
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: [GET_GROUP, GET_TOPIC],
    RequestCode.GET_BROKER_CONSUME_STATS: [GET_CLUSTER],
    RequestCode.VIEW_BROKER_STATS_DATA: [GET_CLUSTER],
    RequestCode.GET_PRODUCER_CONNECTION_LIST: [GET_CLUSTER],
    RequestCode.GET_ALL_PRODUCER_INFO: [GET_CLUSTER],
    RequestCode.GET_TOPIC_CONFIG: [GET_TOPIC],
    RequestCode.GET_TOPIC_STATS_INFO: [GET_TOPIC],
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: [GET_TOPIC],
    RequestCode.QUERY_CONSUME_TIME_SPAN: [GET_GROUP, GET_TOPIC],
    RequestCode.QUERY_CONSUME_QUEUE: [GET_GROUP, GET_TOPIC],
    RequestCode.QUERY_CORRECTION_OFFSET: [GET_GROUP, GET_TOPIC],
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: [GET_GROUP],
    RequestCode.GET_CONSUME_STATS: [GET_GROUP, GET_TOPIC],
    RequestCode.GET_CONSUMER_CONNECTION_LIST: [GET_GROUP],
    RequestCode.QUERY_TOPICS_BY_CONSUMER: [GET_GROUP],
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: [GET_GROUP, GET_TOPIC],
    RequestCode.AUTH_CREATE_USER: [UPDATE_CLUSTER],
    RequestCode.AUTH_UPDATE_USER: [UPDATE_CLUSTER],
    RequestCode.AUTH_DELETE_USER: [UPDATE_CLUSTER],
    RequestCode.AUTH_GET_USER: [GET_CLUSTER],
    RequestCode.AUTH_LIST_USER: [GET_CLUSTER],
    RequestCode.AUTH_CREATE_ACL: [UPDATE_CLUSTER],
    RequestCode.AUTH_UPDATE_ACL: [UPDATE_CLUSTER],
    RequestCode.AUTH_DELETE_ACL: [UPDATE_CLUSTER],
    RequestCode.AUTH_GET_ACL: [GET_CLUSTER],
    RequestCode.AUTH_LIST_ACL: [GET_CLUSTER],
}
