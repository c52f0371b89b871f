"""The files of a directory that no broker uses: one command at a time."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from martlet.errors import StoreLocked
from martlet.store.disk.files import RealDisk
from martlet_acl import offline


def test_a_command_waits_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RealDisk()
    pauses: list[float] = []
    with ExitStack() as first:
        first.enter_context(offline.locked(str(tmp_path), disk))

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                first.close()

        monkeypatch.setattr(offline, "sleep", pause)
        with offline.locked(str(tmp_path), disk, 10):
            assert len(pauses) == 3


def test_a_directory_that_stays_in_use_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RealDisk()
    pauses: list[float] = []
    monkeypatch.setattr(offline, "sleep", pauses.append)
    with offline.locked(str(tmp_path), disk):
        for tries in (1, 4):
            with pytest.raises(StoreLocked), offline.locked(str(tmp_path), disk, tries):
                raise AssertionError
    assert pauses == [offline.PAUSE_S] * 3
