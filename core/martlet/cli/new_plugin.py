"""``martlet plugins new``: writes the first files of a plugin, as a distribution with a setting and a test."""

import argparse
import keyword
import re
from pathlib import Path
from typing import Final

from martlet.cli.outcome import Exit, UsageError

__all__ = ["configure"]

NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
EPILOG: Final = """\
examples:
  martlet plugins new audit                 writes martlet-audit/ in the current directory
  martlet plugins new audit --into ~/src    writes ~/src/martlet-audit/
"""

FILES: Final = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "martlet-@name@"
version = "0.1.0"
description = "A Martlet plugin"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["martlet"]

[project.optional-dependencies]
test = ["pytest", "pytest-trio"]

# The name before the equals sign is the one in plugins.enabled, and that of the section of the configuration.
[project.entry-points."martlet.plugins"]
@name@ = "martlet_@name@:@Name@Plugin"

[tool.hatch.build.targets.wheel]
packages = ["martlet_@name@"]

[tool.pytest.ini_options]
pythonpath = ["."]
trio_mode = true
""",
    "README.md": """\
# martlet-@name@

Refuses messages with a body over a limit. Change it into what you need.

    pip install -e '.[test]' && pytest
    martlet plugins --config martlet.toml
    martlet run --config martlet.toml

`martlet.toml` enables it:

    [plugins]
    enabled = ["remoting", "nameserver", "@name@"]

    [@name@]
    body_bytes_max = 1000
""",
    "martlet_@name@/__init__.py": '''\
"""The Martlet plugin @name@: refuses messages with a body over a limit."""

from collections.abc import Sequence
from typing import ClassVar

from martlet.broker import Broker
from martlet.config import Settings, setting
from martlet.contracts import Stage
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.plugins.hooks import Hooks


class @Name@Config(Settings):
    body_bytes_max: int = setting(1_000_000, "larger bodies are refused", unit="bytes", low=1)


class @Name@Plugin(Hooks):
    config_class: ClassVar[type[Settings] | None] = @Name@Config
    config: @Name@Config

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        limit = self.config.body_bytes_max

        def check(message: Message) -> Message:
            if len(message.body) > limit:
                text = f"the body has {len(message.body)} bytes; @name@.body_bytes_max is {limit}"
                raise Refused(Reason.ILLEGAL, text)
            return message

        return (Stage(check),)
''',
    "tests/test_@name@.py": '''\
"""Tests of the promises of the plugin @name@."""

from pathlib import Path

import pytest
from martlet.errors import Refused
from martlet.message import Message
from martlet.testing.peers import serving
from martlet_@name@ import @Name@Config, @Name@Plugin


async def test_a_body_over_the_limit_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        broker, plugin = running.broker, @Name@Plugin(@Name@Config(body_bytes_max=3))
        broker.set_stages([("@name@", stage) for stage in plugin.martlet_stages(broker)])
        broker.topics.ensure("t", 1)
        broker.publish(Message("t", b"abc"))
        with pytest.raises(Refused, match="the body has 4 bytes; @name@.body_bytes_max is 3"):
            broker.publish(Message("t", b"abcd"))
''',
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("name", help="the plugin's name, such as audit: lower-case letters, digits and _")
    parser.add_argument(
        "--into", metavar="DIR", type=Path, default=Path(), help="write its directory here; default: the current one"
    )
    parser.set_defaults(work=write)


def write(arguments: argparse.Namespace) -> int:
    """Write the plugin; change no existing file. Raises `UsageError`."""
    from martlet.plugins.loader import available

    name = arguments.name
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(f"plugin name {name!r} is invalid; use lower-case letters, digits and _, such as 'audit'")
    if name in available():
        raise UsageError(f"plugin {name!r} is installed already; choose another name")
    folder = arguments.into / f"martlet-{name}"
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise UsageError(f"{str(folder)!r} exists already; choose another name or --into") from error
    for path, text in FILES.items():
        file = folder / _filled(path, name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(_filled(text, name))
    print(f"{folder}: a plugin that refuses large messages, with a test; README.md says how to run both")
    return Exit.OK


def _filled(text: str, name: str) -> str:
    title = "".join(word.capitalize() for word in name.split("_"))
    return text.replace("@Name@", title).replace("@name@", name)
