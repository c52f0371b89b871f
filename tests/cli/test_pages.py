"""Pages that are made from the program do not grow old."""

import re
import tomllib
from pathlib import Path

import pytest

from martlet.cli import commands
from martlet.manual import cli_page, config_page

ROOT = Path(__file__).parents[2]
MADE = {"cli.md": cli_page, "config.md": config_page}
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("name", MADE)
def test_a_made_page_is_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    assert page == MADE[name](), f"run: python -m martlet.manual {name.removesuffix('.md')} > docs/{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_martlet_command_in_a_page_exists(page: Path) -> None:
    names = {command.name for command in commands()}
    said = re.findall(r"(?:^|`|bin/)martlet ([a-z]+)", page.read_text(), re.MULTILINE)
    assert [name for name in said if name not in names | {"ready"}] == []


def test_settings_that_pages_name_exist() -> None:
    keys = set(re.findall(r"^\| `([a-z]+\.[a-z_]+)`", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE))
    sections = {key.partition(".")[0] for key in keys}
    for page in PAGES:
        text = re.sub(r"(?ms)^## Watching it$.*?^## ", "", page.read_text())  # names counters, tried with a broker
        said = re.findall(r"`(?:--set )?([a-z]+\.[a-z_]+)(?: ?=[^`]*)?`", text)
        wrong = [
            key for key in said if key.partition(".")[0] in sections and key not in keys and not key.endswith(".py")
        ]
        assert wrong == [], page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_configurations_in_pages_are_accepted(page: Path) -> None:
    from martlet.run import read_config

    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        read_config(tomllib.loads(block))
