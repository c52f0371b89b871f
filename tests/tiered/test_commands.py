"""``martlet tiered ls`` and ``verify`` say what a cold tier has, and what is damaged."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from martlet.cli.main import main

from .histories import DAY, History, make_history

Told = tuple[int, str, str]
Command = Callable[..., Told]


@pytest.fixture
def history(tmp_path: Path) -> History:
    return make_history(tmp_path / "cold")


@pytest.fixture
def tiered(capsys: pytest.CaptureFixture[str], history: History) -> Command:
    """Runs a command on the tier; returns its exit code, what it printed, and its errors."""

    def run(*words: str, url: str = history.url.removesuffix("/table")) -> Told:
        code = main(["tiered", *words, *(["--url", url] if url else [])])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line]


def test_ls_lists_days_topics_and_queues(tiered: Command, history: History) -> None:
    code, text, _ = tiered("ls")
    head, _, days = text.partition("\n\n")
    assert code == 0
    assert "2 files" in head
    assert "of broker 'broker-a', up to log position " in head
    assert lines(days)[1][:4] == [DAY, "topic", "2", "3,000"]
    _, text, _ = tiered("ls", "--topics")
    assert [row[:4] for row in lines(text)[2:]] == [["Bills", "topic", "4", "1,500"], ["Orders", "topic", "4", "1,500"]]
    _, text, _ = tiered("ls", "--topic", "Orders")
    assert [row[:4] for row in lines(text)[2:]] == [[str(queue), "375", "0", "374"] for queue in range(4)]
    assert lines(text)[2][4] == DAY


def test_ls_prints_json(tiered: Command, history: History) -> None:
    _, text, _ = tiered("ls", "--topics", "--json")
    told = json.loads(text)
    assert (told["broker"], told["epoch"]) == ("broker-a", 1)
    last = history.messages[-1].record
    assert told["end_position"] > last.position
    assert told["rows"][1] == {
        "topic": "Orders",
        "kind": "topic",
        "queues": 4,
        "messages": 1500,
        "first_stored": history.of("Orders")[0].record.store_ms,
        "last_stored": history.of("Orders")[-1].record.store_ms,
    }


def test_the_place_comes_from_the_configuration(tiered: Command, history: History, tmp_path: Path) -> None:
    file = tmp_path / "martlet.toml"
    file.write_text(f'[broker]\nname = "broker-a"\n\n[tiered]\nurl = "{history.url.removesuffix("/table")}"\n')
    code, text, _ = tiered("ls", "--config", str(file), url="")
    assert code == 0
    assert "2 files" in text
    assert tiered("ls", "--set", f"tiered.url={history.url.removesuffix('/table')}", url="")[1] == text


def test_verify_finds_no_damage_in_what_was_uploaded(tiered: Command) -> None:
    code, text, _ = tiered("verify")
    assert code == 0
    assert "2 files" in text
    assert "with 3,000 intact records; no damage was found" in text
    assert "0 files" in tiered("verify", "--date", "2020-01-01")[1]


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "text", "intact"),
    [
        (lambda file, keys: flip(file, 2000), "row group 0", 1500),
        (lambda file, keys: flip(file, -2), "does not end as a Parquet file does", 1500),
        (lambda file, keys: file.unlink(), "does not exist", 1500),
        (lambda file, keys: flip(keys, 30), "its keys: an index of keys does not match its CRC", 3000),
        (lambda file, keys: keys.unlink(), "its keys: ", 3000),
    ],
)
def test_verify_names_each_damaged_file(
    tiered: Command, history: History, damage: Callable[[Path, Path], None], text: str, intact: int
) -> None:
    table = Path(history.url)
    file = min(table.rglob("*.parquet"))
    path = file.relative_to(table)
    damage(file, table.parent / "index" / f"{path}.keys")
    code, told, _ = tiered("verify")
    assert code == 1
    problem, *_, last = told.splitlines()
    assert problem.startswith(f"{path}: ")
    assert text in problem
    assert f"with {intact:,} intact records; 1 files are damaged" in last
    found = json.loads(tiered("verify", "--json")[1])
    assert list(found["damaged"]) == [str(path)]
    assert found["records"] == intact


def test_commands_change_nothing(tiered: Command, history: History) -> None:
    def seen() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in Path(history.url).parent.rglob("*") if file.is_file()}

    log = max((Path(history.url) / "_delta_log").iterdir())
    before = seen()
    tiered("verify")
    tiered("ls", "--topics")
    assert seen() == before
    flip(log, 0)  # as a power cut may leave it
    before = seen()
    tiered("ls")
    assert seen() == before


def test_wrong_places_are_named(tiered: Command, tmp_path: Path) -> None:
    code, _, error = tiered("ls", url="")
    assert code == 2
    assert "no place is given; use --config FILE with tiered.url in it, or --url URL" in error
    code, _, error = tiered("ls", url=str(tmp_path / "nothing"))
    assert code == 1
    assert "there is no table at " in error
    assert not (tmp_path / "nothing").exists()
    code, _, error = tiered("ls", url="ftp://x")
    assert code == 2
    assert "s3://BUCKET/PREFIX" in error
    code, _, error = tiered("ls", "--topic", "Odrers")
    assert code == 1
    assert "has no message of topic 'Odrers'" in error
