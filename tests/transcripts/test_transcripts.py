"""Our bytes beside those of a real RocketMQ broker, conversation by conversation.

``python -m tests.transcripts.record`` writes the transcripts.
"""

from pathlib import Path

import pytest
from tests.interop.martlet_process import Martlet
from tests.transcripts.conversations import CONVERSATIONS
from tests.transcripts.transcript import hold

TRANSCRIPTS = Path(__file__).parent / "files"


@pytest.mark.parametrize("title", CONVERSATIONS)
def test_answers_are_those_of_a_real_broker(title: str, tmp_path: Path) -> None:
    recorded = (TRANSCRIPTS / f"{title}.txt").read_text().splitlines()
    broker = Martlet(tmp_path, {"broker.name": "martlet-wire"})
    try:
        said = hold(CONVERSATIONS[title], broker.address, broker.name_server, "martlet-wire")
    finally:
        broker.stop()
    assert said == recorded
