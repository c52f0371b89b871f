"""Pages that are made from the program do not grow old."""

import argparse
import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
from tools.manual import CLIENT_CHAPTERS, PLUGIN_CHAPTERS, own_plugins
from tools.manual import PAGES as MADE
from tools.reference import Chapter, api_page, exported

from martlet.cli.main import commands, make_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("name", MADE)
def test_a_made_page_is_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert page == MADE[name](), f"run: python -m tools.manual {name} > docs/{name}.md"


def test_each_decision_has_a_number_of_its_own_and_its_title_begins_with_it() -> None:
    found = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [int(page.name[:4]) for page in found] == list(range(1, len(found) + 1))
    for page in found:
        assert page.read_text().startswith(f"# {int(page.name[:4])}. "), page.name


def parsers(title: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield title, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from parsers(f"{title} {name}", inner)


PARSERS = [
    found for command in commands(own_plugins()) for found in parsers(f"martlet {command.name}", make_parser(command))
]


@pytest.mark.parametrize(("title", "parser"), PARSERS, ids=[title for title, _ in PARSERS])
def test_each_option_of_each_command_is_in_its_section_or_in_one_that_the_section_links(
    title: str, parser: argparse.ArgumentParser
) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    sections = dict(re.findall(r"(?ms)^#+ `?([^`\n]+)`?$\n(.*?)(?=^#+ |\Z)", page))
    text = sections[title]
    for name in re.findall(r"\| \[([\w ]+)\]\(#", text):
        text += next(body for heading, body in sections.items() if heading.lower() == name.lower())
    said = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(re.findall(r"(?m)^\| `([^`]+)` \|", text))))
    options = {option for action in parser._actions for option in action.option_strings}
    assert said == options - {"-h", "--help"}


def test_every_public_name_of_the_client_is_on_its_page() -> None:
    said = {entry.partition(":")[0].removesuffix("()") for chapter in CLIENT_CHAPTERS for entry in chapter.names}
    assert said == set(exported("martlet_client"))


def test_the_example_plugins_use_only_what_the_page_for_plugins_lists() -> None:
    said = {entry.partition(":")[0].removesuffix("()") for chapter in PLUGIN_CHAPTERS for entry in chapter.names}
    modules = [
        path
        for path in sorted((ROOT / "examples").glob("*/martlet_*/**/*.py"))
        if "tests" not in path.relative_to(ROOT).parts
    ]
    imports = [node for path in modules for node in ast.walk(ast.parse(path.read_text()))]
    used = {
        name.name
        for node in imports
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "martlet"
        for name in node.names
    }
    assert len(used) > 50
    assert used <= said


@pytest.mark.parametrize("name", ["client-api", "plugin-api"])
def test_nothing_on_an_api_page_is_without_a_description(name: str) -> None:
    """Each class and function has a sentence after its signature; constants may speak for themselves."""
    blocks = re.split(r"\n(?=#{2,4} )", (ROOT / "docs" / f"{name}.md").read_text())
    defined = [block for block in blocks if re.search(r"\n(async )?def |\nclass ", block)]
    assert len(defined) > 50
    assert [block.splitlines()[0] for block in defined if block.rstrip().endswith("```")] == []


def test_an_api_page_shows_signatures_arguments_errors_and_examples() -> None:
    page = (ROOT / "docs" / "client-api.md").read_text()
    assert (
        "#### `PullConsumer.pull`\n\n```python\nasync def pull(\n    queue: MessageQueue,\n    offset: int,\n    *,\n"
        in page
    )
    assert "    messages_max: int = 32,\n" in page  # a constant by its value
    assert "- `retries`: how often a failed send is tried again" in page
    assert "- `RouteNotFound`, `NameServerUnreachable`: nobody knows where to send it.\n" in page
    assert '```python\nasync with Producer("127.0.0.1:9876", "my-group") as producer:\n    result' in page
    assert "Members: `SUCCESS`, `RETRY`." in page
    assert "``" not in page.replace("```", "")
    assert "#### `PushConsumer.rebalance`" not in page
    assert "@asynccontextmanager\nasync def serving(" in (ROOT / "docs" / "plugin-api.md").read_text()


def test_a_name_that_is_gone_is_an_error_of_the_page() -> None:
    with pytest.raises(LookupError, match=r"name 'Nobody' is not defined in martlet\.broker"):
        api_page("", [Chapter("The broker", "martlet.broker", ("Nobody",))])
    with pytest.raises(KeyError, match="shout"):
        api_page("", [Chapter("The broker", "martlet.broker", ("Broker: shout",))])


def test_the_readme_says_what_is_missing_before_how_to_connect() -> None:
    before, _, _ = (ROOT / "README.md").read_text().partition("## Connect a client")
    planned = [line for line in before.splitlines() if re.search(r"\| (planned|not supported)", line)]
    for feature in ("gRPC", "STOMP", "Replication"):
        assert any(feature in line for line in planned), feature


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    entries = re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert entries[0] == version


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def anchors_of(page: str) -> dict[str, str]:
    """The heading of each anchor, as GitHub makes them."""
    found: dict[str, str] = {}
    outside = re.sub(r"(?ms)^```.*?^```$", "", page)
    for heading in re.findall(r"(?m)^#+ (.*)$", outside):
        plain = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        places = [plain, *(f"{plain}-{number}" for number in range(1, 100))]
        found[next(place for place in places if place not in found)] = heading
    return found


@pytest.mark.parametrize("name", ["client-api", "plugin-api"])
def test_names_at_the_head_of_an_api_page_lead_to_their_descriptions(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    anchors = anchors_of(page)
    links = re.findall(r"\[(`\w+`)\]\(#([^)]+)\)", page)
    assert len(links) > 20
    assert [(said, place) for said, place in links if anchors.get(place) != said] == []


@cache
def command_names() -> set[str]:
    return {command.name for command in commands()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_martlet_command_in_a_page_exists(page: Path) -> None:
    said = re.findall(r"(?:^|`|bin/)martlet ([a-z]+)", page.read_text(), re.MULTILINE)
    assert [name for name in said if name not in command_names() | {"ready"}] == []


def test_settings_that_pages_name_exist() -> None:
    keys = set(re.findall(r"^\| `([a-z]+\.[a-z_]+)`", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE))
    sections = {key.partition(".")[0] for key in keys}
    found = 0
    for page in PAGES:
        text = re.sub(r"(?ms)^## Monitoring$.*?^## ", "", page.read_text())  # names counters, tried with a broker
        said = re.findall(r"`(?:--set )?([a-z]+\.[a-z_]+)(?: ?=[^`]*)?`", text)
        wrong = [
            key for key in said if key.partition(".")[0] in sections and key not in keys and not key.endswith(".py")
        ]
        assert wrong == [], page.name
        found += sum(key in keys for key in said)
    assert found > 50, "pages name settings"


BLOCKS = [(page, block) for page in PAGES for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[str(page.relative_to(ROOT)) for page, _ in BLOCKS])
def test_configurations_in_pages_are_accepted(page: Path, block: str) -> None:
    from martlet.app.config import SECTIONS, read_config

    table = tomllib.loads(block)
    assert table, "it sets something"
    config = read_config(table)
    for section, values in table.items():
        if section in SECTIONS:
            taken = getattr(config, section)
            assert {key: getattr(taken, key) for key in values} == values
        else:
            assert config.plugin_tables[section] == values


def test_the_log_lines_of_the_operations_page_are_those_of_the_program() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.partition("\n## What the log says\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `([^`]+)` ", table, re.MULTILINE)
    # Of what is installed, so that it holds for the wheel as well.
    folders = [Path(str(files(package))) for package in ("martlet", "martlet_client", "martlet_remoting")]
    sources = [path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))]
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))  # strings that go on in the next line
    # What differs from event to event: dots, a capital letter, numbers and addresses.
    pieces = {line: re.split(r"\.{2,}|\b[NMTQ]\b|'|[\d.]*\d[\d.:]*", line) for line in lines}
    assert len(pieces) > 20
    assert {line for line, parts in pieces.items() if any(part.strip() not in source for part in parts)} == set()
