"""What the interop tests need is fetched even when the network fails for a moment."""

import sys
from pathlib import Path

import pytest

from . import fetch

# Fails until it was run COUNT times.
COUNTING = """
import pathlib, sys
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
sys.exit("the network is away" if len(tries.read_text()) < int(sys.argv[2]) else 0)
"""


def words(tries: Path, count: int) -> list[str]:
    return [sys.executable, "-c", COUNTING, str(tries), str(count)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PAUSES_S", (0.0,) * len(fetch.PAUSES_S))


def test_a_download_that_fails_is_tried_again(tmp_path: Path) -> None:
    fetch.download(words(tmp_path / "tries", 2))
    assert (tmp_path / "tries").read_text() == "xx"


def test_a_download_that_fails_each_time_says_why(tmp_path: Path) -> None:
    with pytest.raises(fetch.NotFetched, match="the network is away"):
        fetch.download(words(tmp_path / "tries", 99))
    assert len((tmp_path / "tries").read_text()) == len(fetch.PAUSES_S) + 1
