"""A data directory continues its own table after every end of a broker, and never one that another has continued."""

from pathlib import Path

import pytest
import trio

from martlet.cli.main import main
from martlet.store.disk.files import RealDisk
from martlet_tiered.errors import Fenced
from martlet_tiered.upload.ownership import OWNER_FILE, Ownership, read_owners

from .cold import Tier
from .uploads import Place, begin_upload, check_tier, filled_store, open_store, table_of, until, upload_all


class Processes:
    """Processes of the brokers of some data directories, one after the other."""

    def __init__(self, tier: Tier, folder: Path) -> None:
        self._tier = tier
        self._folder = folder
        self._count = 0

    def start(self, directory: str, until: str = "save") -> int:
        """Take the table over as a new process of *directory* does, which dies after step *until*; return the epoch."""
        self._count += 1
        ownership = Ownership(RealDisk(), str(self._folder / directory), f"process{self._count}")
        owner = ownership.next_owner()
        if until == "next_owner":
            return 0
        epoch = self._tier.exact_table().take_over(owner, ownership.owners)
        ownership.take(epoch)
        if until == "save":
            ownership.save()
        return epoch


@pytest.mark.parametrize("steps", ["next_owner", "take_over", "next_owner take_over next_owner", "take_over take_over"])
def test_a_directory_owns_its_table_after_every_end_of_a_process(tmp_path: Path, local_tier: Tier, steps: str) -> None:
    processes = Processes(local_tier, tmp_path)
    assert processes.start("a") == 1
    for step in steps.split():
        processes.start("a", step)
    assert processes.start("a") == 2 + steps.split().count("take_over")
    assert len(read_owners(RealDisk(), str(tmp_path / "a")).names) == 1
    processes.start("b")
    for step in steps.split() * 2:
        if step == "take_over":
            with pytest.raises(Fenced, match=r"owned it last in epoch .* start the broker with that one"):
                processes.start("a", step)
        else:
            processes.start("a", step)
    assert processes.start("b") == 4 + steps.split().count("take_over")


def test_a_damaged_note_counts_as_its_last_generation(tmp_path: Path, local_tier: Tier) -> None:
    processes = Processes(local_tier, tmp_path)
    processes.start("a")
    processes.start("a")
    (tmp_path / "a" / OWNER_FILE).write_bytes(b"{")
    assert processes.start("a") == 3


async def test_an_older_directory_does_not_continue_the_table_of_a_newer_one(tmp_path: Path, local_tier: Tier) -> None:
    async with open_store(tmp_path) as store:
        filled_store(store, 20)
        await upload_all(store, Place(local_tier))
        filled_store(store, 20, 20)
        table_of(local_tier).take_over("another directory/1")
        version = table_of(local_tier).version
        async with begin_upload(store, Place(local_tier)) as held:  # as a start does
            await held.uploader.release(store.durable)
            await until(lambda: "another one continues it" in held.uploader.reason)
        assert table_of(local_tier).version == version
        check_tier(local_tier, store, table_of(local_tier).end)


def test_commands_do_not_use_the_directory_of_an_older_owner(
    tmp_path: Path, local_tier: Tier, capsys: pytest.CaptureFixture[str]
) -> None:
    async def upload() -> None:
        async with open_store(tmp_path) as store:
            filled_store(store, 20)
            await upload_all(store, Place(local_tier))

    trio.run(upload)
    words = ["--url", local_tier.url, "--data", str(tmp_path / "store")]
    for _ in range(2):  # a purge is no other directory
        assert main(["tiered", "purge", *words]) == 0
        assert main(["tiered", "rebuild", *words]) == 0
    table_of(local_tier).take_over("another directory/1")
    version = table_of(local_tier).version
    for command in ("purge", "rebuild"):
        assert main(["tiered", command, *words]) == 1
        assert "another one continues it" in capsys.readouterr().err
    assert table_of(local_tier).version == version
