"""The state that connections share is passed on in parts: a function of a handler gets what it uses."""

import ast
from pathlib import Path
from typing import Final

from .conftest import Harness

HANDLERS: Final = Path(__file__).parents[2] / "plugins/remoting/martlet_remoting/handlers"


def names(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def test_no_function_of_a_handler_gets_the_whole_state() -> None:
    # The state itself, and a capability for another plugin, which has no connection.
    paths = [path for path in HANDLERS.rglob("*.py") if path.name not in ("context.py", "producers.py")]
    assert len(paths) > 10
    assert [path.name for path in paths if "RemotingState" in names(path.read_text())] == []


async def test_a_new_address_is_in_new_records_message_ids_and_answers(harness: Harness) -> None:
    host = bytes([192, 0, 2, 7]) + (10911).to_bytes(4, "big")
    harness.state.set_store_host(host)
    templates = harness.state.templates
    assert harness.store.writer.store_host == templates.store_host == host
    assert templates.message_id(255) == "C000020700002A9F00000000000000FF"
    assert b"C000020700002A9F" in templates.sent_usual
