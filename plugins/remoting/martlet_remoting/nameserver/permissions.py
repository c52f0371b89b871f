"""The permission that each request needs, by request code.

The actions are those of the headers of RocketMQ 5.5.0 (annotation RocketMQAction), although its name server asks
nobody. Codes without a header have none there; here they need what similar ones need.
"""

from collections.abc import Mapping
from typing import Final

from martlet.access import Gate
from martlet.contracts import Action
from martlet.errors import Reason, Refused
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

__all__ = ["CLUSTER_ACTIONS", "TOPIC_REQUESTS", "check"]

# Actions on the cluster.
CLUSTER_ACTIONS: Final[Mapping[int, Action]] = {
    RequestCode.PUT_KV_CONFIG: "update",
    RequestCode.GET_KV_CONFIG: "get",
    RequestCode.DELETE_KV_CONFIG: "update",
    RequestCode.REGISTER_BROKER: "update",
    RequestCode.UNREGISTER_BROKER: "update",
    RequestCode.GET_BROKER_CLUSTER_INFO: "get",
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: "update",
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: "list",
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: "update",
    RequestCode.GET_KVLIST_BY_NAMESPACE: "get",
    RequestCode.GET_TOPICS_BY_CLUSTER: "list",
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: "list",
    RequestCode.GET_UNIT_TOPIC_LIST: "list",
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: "list",
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: "list",
    RequestCode.UPDATE_NAMESRV_CONFIG: "update",
    RequestCode.GET_NAMESRV_CONFIG: "get",
    # It renews the registration if the version is known; RocketMQ asks for GET.
    RequestCode.QUERY_DATA_VERSION: "update",
    RequestCode.ADD_WRITE_PERM_OF_BROKER: "update",
    RequestCode.GET_BROKER_MEMBER_GROUP: "get",
    RequestCode.BROKER_HEARTBEAT: "update",
}
# Each broker repeats these all the time, so permitted ones do not reach the audit trail.
REPEATED: Final = frozenset((RequestCode.REGISTER_BROKER, RequestCode.QUERY_DATA_VERSION, RequestCode.BROKER_HEARTBEAT))
# These ask about the topic that they name.
TOPIC_REQUESTS: Final = frozenset((RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.DELETE_TOPIC_IN_NAMESRV))


def check(server: NameServer, gate: Gate, command: Command) -> None:
    """Raise `Refused` unless the identity of *gate* may send *command*.

    The refusal of a route is that of a topic without one, and no route is looked up before.
    """
    code = command.code
    if code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
        topic = command.text("topic")
        try:
            gate.queries.route(topic)
        except Refused as error:
            raise (server.no_route(topic) if error.reason is Reason.NO_PERMISSION else error) from error
    elif code == RequestCode.DELETE_TOPIC_IN_NAMESRV:
        # RocketMQ's tool sends it after the topic was deleted on the brokers, which asks for this permission.
        if not gate.allows("update", ""):
            gate.check("delete", command.text("topic"))
    else:
        action = CLUSTER_ACTIONS.get(code, "update")
        if code not in REPEATED or not gate.allows(action, ""):
            gate.check(action, "")
