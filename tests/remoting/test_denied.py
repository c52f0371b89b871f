"""A client without permissions cannot tell whether a topic or a group exists."""

from collections.abc import Mapping
from typing import Any

import pytest

from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .conftest import Harness
from .test_permission import CASES, encoded, prepared

OTHER_NAMES = {"T": "U", "G": "H", "%RETRY%G": "%RETRY%H", "c": "d"}
# A message is named by its position, and the refusal names no topic.
BY_POSITION = {RequestCode.VIEW_MESSAGE_BY_ID, RequestCode.CONSUMER_SEND_MSG_BACK}


def renamed(value: Any) -> Any:
    """Return *value* with the names of a topic and a group that do not exist."""
    if isinstance(value, Mapping):
        return {name: renamed(each) for name, each in value.items()}
    if isinstance(value, list):
        return [renamed(each) for each in value]
    if isinstance(value, bytes):
        return value.replace(b"G=1", b"H=1") if value != b"G" else b"H"
    return OTHER_NAMES.get(value, value) if isinstance(value, str) else value


def shown(text: object) -> str:
    """Return a remark with the names of the other topic and group."""
    return str(text).replace("[T]", "[U]").replace("[G]", "[H]").replace("'T'", "'U'").replace("'G'", "'H'")


@pytest.mark.parametrize(("code", "ext", "body", "wanted"), CASES, ids=[str(case[0]) for case in CASES])
async def test_a_request_is_refused_in_the_same_words_whether_its_topic_and_group_exist_or_not(
    harness: Harness, code: int, ext: Mapping[str, object], body: object, wanted: list[str]
) -> None:
    await prepared(harness)
    harness.broker.groups.ensure("G")
    client = harness.client()
    await client.heartbeat("c", "G", "T")
    harness.broker.groups.offsets.commit("G", "T", 0, 1)
    harness.broker.authorizers = (lambda identity, action, name: False,)
    existing = await client.ask(code, ext, encoded(body))
    missing = await client.ask(code, renamed(ext), encoded(renamed(body)))
    assert (existing.code, existing.ext, existing.body) == (missing.code, missing.ext, missing.body)
    if code in BY_POSITION:
        assert "T" not in str(existing.remark).split()
    else:
        assert shown(existing.remark) == str(missing.remark)
    if wanted:
        assert existing.code == ResponseCode.NO_PERMISSION
