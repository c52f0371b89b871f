"""Handlers for requests to the name server, in a table by request code."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from martlet.errors import MartletError, Reason, Refused
from martlet.runtime.steps import Steps
from martlet_remoting.nameserver.kvconfig import ORDER_TOPICS
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.nameserver.table import UNIT, UNIT_SUB
from martlet_remoting.wire import fastjson
from martlet_remoting.wire.codec import encode_response, encode_response_in_pieces
from martlet_remoting.wire.codes import VERSION_4_9_4, RequestCode, ResponseCode
from martlet_remoting.wire.packets import NO_EXT, Command, Frame
from martlet_remoting.wire.register_broker import NAME_CHARS_MAX, VERSION_BYTES_MAX, decode_registration
from martlet_remoting.wire.routes import MASTER_ID, TopicQueues, TopicRoute, Version, encode_route
from martlet_remoting.wire.unsupported import unsupported_text

__all__ = ["REQUESTS", "SAVED", "answer", "answer_when_saved", "refusal"]

log = logging.getLogger("martlet.nameserver")

# (name server, connection, request) -> the frame of the answer, or a generator that returns it after slices
Answer: TypeAlias = bytes | Steps[Frame]
Handle: TypeAlias = Callable[[NameServer, object, Command], Answer]

_CODES: Final = {
    Reason.BUSY: ResponseCode.SYSTEM_BUSY,
    Reason.CREDENTIALS: ResponseCode.NO_PERMISSION,
    Reason.ENDED: ResponseCode.NO_PERMISSION,
    Reason.EXPIRED: ResponseCode.NO_PERMISSION,
    Reason.NOT_FOUND: ResponseCode.QUERY_NOT_FOUND,
    Reason.NO_TOPIC: ResponseCode.TOPIC_NOT_EXIST,
    Reason.NO_PERMISSION: ResponseCode.NO_PERMISSION,
    Reason.QUOTA: ResponseCode.SYSTEM_BUSY,
    Reason.UNAVAILABLE: ResponseCode.SERVICE_NOT_AVAILABLE,
}


def answer(server: NameServer, connection: object, command: Command) -> Steps[Frame]:
    """Return the frame that answers or refuses *command*; most requests take one slice."""
    server.requests += 1
    handle = REQUESTS.get(command.code)
    if command.code in OF_TOOLS:
        server.tools.add(connection)
    if handle is None:
        text = unsupported_text(command.code)
        return encode_response(command.opaque, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=text)
    try:
        found = handle(server, connection, command)
        return found if isinstance(found, bytes) else (yield from found)
    except (MartletError, OSError) as error:
        return refusal(command, error)


async def answer_when_saved(server: NameServer, command: Command) -> bytes:
    """Return the answer like `answer`, for a request in `SAVED`."""
    server.requests += 1
    try:
        await SAVED[command.code](server, command)
    except (MartletError, OSError) as error:
        return refusal(command, error)
    return _reply(command)


def refusal(command: Command, error: MartletError | OSError) -> bytes:
    """Return the answer for *error*: a refusal, a body that cannot be read, or a disk that cannot be written."""
    code = _CODES.get(error.reason) if isinstance(error, Refused) else None
    return encode_response(command.opaque, code or ResponseCode.SYSTEM_ERROR, remark=str(error))


def _reply(command: Command, ext: Mapping[str, object] = NO_EXT, body: bytes = b"") -> bytes:
    return encode_response(command.opaque, ResponseCode.SUCCESS, ext, body)


def _reply_in_pieces(command: Command, body: list[bytes]) -> Frame:
    return encode_response_in_pieces(command.opaque, ResponseCode.SUCCESS, NO_EXT, body)


# brokers


def _register(server: NameServer, connection: object, command: Command) -> Steps[Frame]:
    registration = yield from decode_registration(command, server.config.broker_topics_max)
    registered = yield from server.table.register(registration, server.now(), connection)
    ext: dict[str, object] = {}
    if registered.master_address:
        ext = {"haServerAddr": registered.ha_address, "masterAddr": registered.master_address}
    remark = None
    if registered.left_out:
        # No refusal: a broker that gets one may close the connection and lose all its routes.
        remark = f"{registered.left_out} new topics of broker {registration.name!r} have no route"
        remark += f"; the table is full, nameserver.topics_max is {server.config.topics_max}"
        log.warning("%s", remark)
    orders = server.kv.namespace(ORDER_TOPICS) if server.switches["returnOrderTopicConfigToBroker"] else None
    body = (yield from fastjson.dumps_in_steps({"table": orders})) if orders is not None else []
    return encode_response_in_pieces(command.opaque, ResponseCode.SUCCESS, ext, body, remark)


def _unregister(server: NameServer, connection: object, command: Command) -> bytes:
    server.table.unregister(command.text("clusterName"), command.text("brokerName"), command.text("brokerAddr"))
    return _reply(command)


def _query_version(server: NameServer, connection: object, command: Command) -> bytes:
    cluster, address = command.text("clusterName"), command.text("brokerAddr")
    version = server.table.version_of(cluster, address)
    if len(command.body) > VERSION_BYTES_MAX:
        text = f"body of {len(command.body)} bytes is not a version; it has at most {VERSION_BYTES_MAX}"
        raise Refused(Reason.MALFORMED, text)
    is_changed = version is None or version != Version.from_json(fastjson.load_object(command.body or b"{}"))
    if not is_changed:
        server.table.live.heard(cluster, address, server.now())
    body = fastjson.dumps(version.as_json()) if version is not None else b""
    return _reply(command, {"changed": is_changed}, body)


def _heartbeat(server: NameServer, connection: object, command: Command) -> bytes:
    server.table.live.heard(command.text("clusterName"), command.text("brokerAddr"), server.now())
    return _reply(command)


def _member_group(server: NameServer, connection: object, command: Command) -> bytes:
    cluster, name = command.text("clusterName"), command.text("brokerName")
    try:
        addresses: Mapping[int, str] = server.table.group(name).addresses
    except KeyError:
        addresses = {}
    group = {"brokerAddrs": dict(sorted(addresses.items())), "brokerName": name, "cluster": cluster}
    return _reply(command, body=fastjson.dumps({"brokerMemberGroup": group}))


def _cluster_info(server: NameServer, connection: object, command: Command) -> Steps[Frame]:
    brokers = fastjson.Lazy((group.name, group.as_json()) for group in server.table.groups())
    table = {"brokerAddrTable": brokers, "clusterAddrTable": server.table.clusters()}
    return encode_response_in_pieces(
        command.opaque, ResponseCode.SUCCESS, NO_EXT, (yield from fastjson.dumps_in_steps(table))
    )


def _wipe_write(server: NameServer, connection: object, command: Command) -> Steps[bytes]:
    return _reply(command, {"wipeTopicCount": (yield from server.table.wipe_write(command.text("brokerName")))})


def _add_write(server: NameServer, connection: object, command: Command) -> Steps[bytes]:
    return _reply(command, {"addTopicCount": (yield from server.table.add_write(command.text("brokerName")))})


# topics


def _route(server: NameServer, connection: object, command: Command) -> bytes:
    topic = command.text("topic")
    route = server.table.route(topic) or server.planned_route(topic, connection)
    if route is None:
        raise server.no_route(topic)
    server.clients.add(connection)
    if server.switches["orderMessageEnable"]:
        route = replace(route, order=server.kv.get(ORDER_TOPICS, topic))
    if command.boolean("__ZONE_MODE") and command.text("__ZONE_NAME", ""):
        route = _near(route, command.text("__ZONE_NAME"))
    standard = command.version >= VERSION_4_9_4 or command.boolean("acceptStandardJsonOnly")
    return _reply(command, body=encode_route(route, standard=standard))


def _near(route: TopicRoute, zone: str) -> TopicRoute:
    """Return *route* without brokers in other zones; keep a broker without a master, as its slaves can be read."""
    brokers = {
        name: group for name, group in route.brokers.items() if MASTER_ID not in group.addresses or group.zone == zone
    }
    far = route.brokers.keys() - brokers.keys()
    queues = tuple(entry for entry in route.queues if entry.broker_name not in far)
    return replace(route, brokers=brokers, queues=queues)


def _delete_topic(server: NameServer, connection: object, command: Command) -> bytes:
    server.table.delete_topic(command.text("topic"), command.text("clusterName", "") or None)
    return _reply(command)


def _register_topic(server: NameServer, connection: object, command: Command) -> Steps[bytes]:
    topic = command.text("topic")
    entries = (yield from fastjson.read_object(command.body or b"{}")).get("queueDatas")
    if len(topic) > NAME_CHARS_MAX:
        raise Refused(Reason.PARAMETER, f"topic {topic!r:.80} has {len(topic)} characters; at most {NAME_CHARS_MAX}")
    if isinstance(entries, list):
        server.table.register_topic(topic, map(TopicQueues.from_json, entries))
    return _reply(command)


def _list(switch: str, find: Callable[[NameServer, Command], Steps[list[str]]]) -> Handle:
    """Return a handler that answers a list of topics, if *switch* allows it."""

    def handle(server: NameServer, connection: object, command: Command) -> Steps[Frame]:
        if not server.switches[switch]:
            raise Refused(Reason.NOT_SUPPORTED, f"disable; {switch} is false, so lists of topics are not answered")
        names = yield from find(server, command)
        return encode_response_in_pieces(
            command.opaque, ResponseCode.SUCCESS, NO_EXT, (yield from fastjson.dumps_in_steps({"topicList": names}))
        )

    return handle


def _system_topics(server: NameServer, connection: object, command: Command) -> bytes:
    names: list[str] = []
    for cluster, brokers in server.table.clusters().items():
        names += [cluster, *brokers]
    addresses = (group.addresses for group in server.table.groups())
    address = next((found[min(found)] for found in addresses if found), None)
    return _reply(command, body=fastjson.dumps({"brokerAddr": address, "topicList": names}))


# texts and switches


async def _put_kv(server: NameServer, command: Command) -> None:
    await server.kv.put(command.text("namespace"), command.text("key"), command.text("value"))


def _get_kv(server: NameServer, connection: object, command: Command) -> bytes:
    namespace, key = command.text("namespace"), command.text("key")
    value = server.kv.get(namespace, key)
    if value is None:
        raise Refused(Reason.NOT_FOUND, f"No config item, Namespace: {namespace} Key: {key}")
    return _reply(command, {"value": value})


async def _delete_kv(server: NameServer, command: Command) -> None:
    await server.kv.delete(command.text("namespace"), command.text("key"))


def _list_kv(server: NameServer, connection: object, command: Command) -> Steps[Frame]:
    name = command.text("namespace")
    values = server.kv.namespace(name)
    if values is None:
        raise Refused(Reason.NOT_FOUND, f"No config item, Namespace: {name}")
    return encode_response_in_pieces(
        command.opaque, ResponseCode.SUCCESS, NO_EXT, (yield from fastjson.dumps_in_steps({"table": values}))
    )


def _get_config(server: NameServer, connection: object, command: Command) -> bytes:
    return _reply(command, body=server.properties())


def _update_config(server: NameServer, connection: object, command: Command) -> bytes:
    server.change(command.body)
    return _reply(command)


# Requests that are answered once their change is on disk.
SAVED: Final[dict[int, Callable[[NameServer, Command], Awaitable[None]]]] = {
    RequestCode.PUT_KV_CONFIG: _put_kv,
    RequestCode.DELETE_KV_CONFIG: _delete_kv,
}
# Requests that no producer or consumer sends.
OF_TOOLS: Final = frozenset(
    {
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_KVLIST_BY_NAMESPACE,
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        RequestCode.GET_NAMESRV_CONFIG,
    }
)
REQUESTS: Final[dict[int, Handle]] = {
    RequestCode.GET_KV_CONFIG: _get_kv,
    RequestCode.REGISTER_BROKER: _register,
    RequestCode.UNREGISTER_BROKER: _unregister,
    RequestCode.GET_ROUTEINFO_BY_TOPIC: _route,
    RequestCode.GET_BROKER_CLUSTER_INFO: _cluster_info,
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: _wipe_write,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _list("enableAllTopicList", lambda s, c: s.table.index.names()),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: _delete_topic,
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: _register_topic,
    RequestCode.GET_KVLIST_BY_NAMESPACE: _list_kv,
    RequestCode.GET_TOPICS_BY_CLUSTER: _list(
        "enableTopicList", lambda s, c: s.table.topics_of_cluster(c.text("cluster"))
    ),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: _system_topics,
    RequestCode.GET_UNIT_TOPIC_LIST: _list("enableTopicList", lambda s, c: s.table.index.names_by_flag(UNIT)),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: _list(
        "enableTopicList", lambda s, c: s.table.index.names_by_flag(UNIT_SUB)
    ),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: _list(
        "enableTopicList", lambda s, c: s.table.index.names_by_flag(UNIT_SUB, UNIT)
    ),
    RequestCode.UPDATE_NAMESRV_CONFIG: _update_config,
    RequestCode.GET_NAMESRV_CONFIG: _get_config,
    RequestCode.QUERY_DATA_VERSION: _query_version,
    RequestCode.ADD_WRITE_PERM_OF_BROKER: _add_write,
    RequestCode.GET_BROKER_MEMBER_GROUP: _member_group,
    RequestCode.BROKER_HEARTBEAT: _heartbeat,
}
