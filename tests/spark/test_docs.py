"""The tables of options in docs/spark.md are those of the program: ``python -m tests.spark.test_docs`` writes them."""

import re
from pathlib import Path

from martlet_columns.schema import COLUMNS
from martlet_spark import options
from martlet_spark.columns import DEFAULT
from martlet_spark.options import BATCH, CLUSTER, SINK, SOURCE, STREAM, Option
from martlet_spark.write.columns import SINK_COLUMNS

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
TABLES = {
    "SOURCE": SOURCE,
    "BATCH": tuple(option for option in BATCH if option not in SOURCE),
    "STREAM": tuple(option for option in STREAM if option not in SOURCE),
    "SINK": tuple(option for option in SINK if option not in CLUSTER),
}


def table(shown: tuple[Option, ...]) -> str:
    lines = ["| option | default | meaning | example |", "|---|---|---|---|"]
    for option in shown:
        default = f"`{_default(option)}`" if _default(option) else ""
        example = f"`{option.example}`" if option.example else ""
        lines.append(f"| `{option.name}` | {default} | {option.text} | {example} |".replace("||", "\\|\\|"))
    return "\n".join(lines)


def _default(option: Option) -> str:
    """The default of *option* as a user writes it; empty for none."""
    default = option.default
    if isinstance(default, bool):
        return str(default).lower()
    if option.parse is options._ms and default is not None:
        return f"{default}ms"
    if option.parse is options._bytes and isinstance(default, int) and default:
        return f"{default >> 20}m"
    return ",".join(default) if isinstance(default, tuple) else str(default or "")


def sink_columns() -> str:
    lines = ["| column of the sink | type | meaning |", "|---|---|---|"]
    for name, (kinds, text) in SINK_COLUMNS.items():
        lines.append(f"| `{name}` | {' or '.join(kinds)} | {text} |")
    return "\n".join(lines)


def page() -> str:
    text = PAGE.read_text()
    tables = {f"options: {name}": table(shown) for name, shown in TABLES.items()}
    for name, found in {**tables, "columns: SINK": sink_columns()}.items():
        marker = f"<!-- {name} -->\n"
        text = re.sub(rf"{marker}(\n(\|[^\n]*\n)+)?", f"{marker}\n{found}\n".replace("\\", "\\\\"), text)
    return text


def test_the_page_has_every_option() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.spark.test_docs"


def test_the_page_has_every_column() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([\w<>,]+) \| (.*) \|$", PAGE.read_text().partition("## Writing")[0], re.MULTILINE
    )
    assert {name: kind for name, kind, _ in rows} == {name: kind for name, (kind, _) in COLUMNS.items()}
    assert {name for name, _, text in rows if "selected by default" in text} == set(DEFAULT)


if __name__ == "__main__":
    PAGE.write_text(page())
