"""Requests of features that do not exist here: the remark says what to do instead."""

import pytest

from martlet.runtime.steps import finish_now
from martlet_remoting.nameserver.requests import answer
from martlet_remoting.wire.codec import decode_frame
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import Harness, joined
from .test_nameserver_requests import Station

ABSENT = [
    (RequestCode.UPDATE_AND_CREATE_ACL_CONFIG, "users and rules are managed in the plugin"),
    (RequestCode.GET_BROKER_CLUSTER_ACL_INFO, "with listUser and listAcl"),
    (RequestCode.UPDATE_GLOBAL_WHITE_ADDRS_CONFIG, "each request must be signed"),
    (RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG, "with listUser and listAcl"),
    (RequestCode.AUTH_CREATE_USER, "users and rules are managed in the plugin"),
    (RequestCode.AUTH_LIST_ACL, "add the plugin acl to plugins.enabled"),
    (RequestCode.CONTROLLER_ELECT_MASTER, "this cluster has no controller"),
    (RequestCode.GET_BROKER_EPOCH_CACHE, "this cluster has no controller"),
    (RequestCode.GET_SYNC_STATE_DATA_REQUEST, "this cluster has no controller"),
    (RequestCode.ADD_BROKER, "martlet run"),
    (RequestCode.REMOVE_BROKER, "martlet run"),
    (RequestCode.RESET_MASTER_FLUSH_OFFSET, "a broker has no slaves"),
    (RequestCode.CHECK_ROCKSDB_CQ_WRITE_PROGRESS, "nothing is kept in RocksDB"),
    (RequestCode.EXPORT_ROCKSDB_CONFIG_TO_JSON, "nothing is kept in RocksDB"),
    (RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, "create the topic with updateTopic"),
    (RequestCode.POP_LITE_MESSAGE, "use light topics"),
    (RequestCode.TRIGGER_LITE_DISPATCH, "use light topics"),
    (RequestCode.SWITCH_TIMER_ENGINE, "timed messages have one engine"),
    (RequestCode.SET_COMMITLOG_READ_MODE, "not mapped into memory"),
]


@pytest.mark.parametrize(("code", "instead"), ABSENT)
async def test_the_answer_of_a_broker_says_what_to_do_instead(harness: Harness, code: int, instead: str) -> None:
    answer = await harness.client().ask(code)
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert str(answer.remark).startswith(f" request type {code} not supported; ")
    assert instead in str(answer.remark)


def test_a_name_server_says_that_there_is_no_controller() -> None:
    asked = Command(RequestCode.CONTROLLER_GET_METADATA_INFO, {}, opaque=1)
    answered = decode_frame(joined(finish_now(answer(Station().server, object(), asked))))
    assert answered.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert "this cluster has no controller" in str(answered.remark)
