"""The remark for a request that nothing here handles: RocketMQ's text, then a hint for a known feature."""

from typing import Final

from martlet_remoting.wire.codes import RequestCode

__all__ = ["unsupported_text"]

_USERS: Final = (
    "users and rules are managed in the plugin that authenticates clients; add the plugin acl to plugins.enabled to "
    "manage them here"
)
_OLD_ACLS: Final = "users and rules are shown by the tools of RocketMQ 5.3 and later, with listUser and listAcl"
_ADDRESSES: Final = "each request must be signed, wherever it comes from; rules can name networks, see createAcl"
_CONTROLLER: Final = "this cluster has no controller, and each broker is its own master"
_CONTAINER: Final = "a broker is one process; start another one with martlet run"
_LITE: Final = "lite topics do not exist here; use light topics, %LMQ%..., with remoting.light_queues"
_ROCKSDB: Final = "nothing is kept in RocksDB; topics, groups and offsets are JSON files in config/"

_INSTEAD: Final[dict[int, str]] = {
    RequestCode.UPDATE_AND_CREATE_ACL_CONFIG: _USERS,
    RequestCode.DELETE_ACL_CONFIG: _USERS,
    RequestCode.GET_BROKER_CLUSTER_ACL_INFO: _OLD_ACLS,
    RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG: _ADDRESSES,
    RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG: _OLD_ACLS,
    **dict.fromkeys(range(RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_LIST_ACL + 1), _USERS),
    **dict.fromkeys(range(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, 1019), _CONTROLLER),
    **dict.fromkeys(range(RequestCode.POP_LITE_MESSAGE, RequestCode.TRIGGER_LITE_DISPATCH + 1), _LITE),
    RequestCode.ADD_BROKER: _CONTAINER,
    RequestCode.REMOVE_BROKER: _CONTAINER,
    RequestCode.RESET_MASTER_FLUSH_OFFSET: "a broker has no slaves, so nothing waits for such an offset",
    RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: _ROCKSDB,
    RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON: _ROCKSDB,
    RequestCode.POP_ROLLBACK: _ROCKSDB,
    RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC: "static topics do not exist here; create the topic with updateTopic",
    RequestCode.SWITCH_TIMER_ENGINE: "timed messages have one engine, which keeps its state in the log",
    RequestCode.SET_COMMITLOG_READ_MODE: "the log is not mapped into memory, so there is no read-ahead mode to set",
}


def unsupported_text(code: int) -> str:
    """Return the remark of the answer to a request with *code* that nothing handles."""
    text = f" request type {code} not supported"
    instead = _INSTEAD.get(code)
    return text if instead is None else f"{text}; {instead}"
