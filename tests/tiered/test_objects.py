"""The same promises for an S3 server, a local directory and memory."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from martlet_tiered.config import TieredConfig
from martlet_tiered.credentials import Credentials
from martlet_tiered.errors import AccessRefused, ObjectChanged, ObjectDamaged, ObjectExists, ObjectMissing
from martlet_tiered.local import LocalObjects
from martlet_tiered.location import TierLocation
from martlet_tiered.objects import Objects
from martlet_tiered.remote import RemoteObjects

from .cold import Tier, now_ms


def in_memory() -> RemoteObjects:
    return RemoteObjects(TierLocation("memory:///", Credentials({}), {}), TieredConfig(url="memory:///"))


@pytest.fixture(params=["s3", "local", "memory"])
def objects(request: pytest.FixtureRequest) -> Iterator[Objects]:
    if request.param == "memory":
        yield in_memory()
    else:
        yield request.getfixturevalue(f"{request.param}_tier").objects()


def test_an_object_that_was_created_can_be_read(objects: Objects) -> None:
    objects.create("a/b/one", b"0123456789")
    assert objects.read("a/b/one") == b"0123456789"
    assert objects.size("a/b/one") == 10
    assert objects.read_range("a/b/one", 2, 5) == b"234"
    assert objects.read_ranges("a/b/one", [(0, 1), (9, 10), (4, 6)]) == [b"0", b"9", b"45"]
    assert objects.read_ranges("a/b/one", []) == []


def test_an_empty_object_is_an_object(objects: Objects) -> None:
    objects.create("empty", b"")
    assert objects.read("empty") == b""
    assert objects.size("empty") == 0


def test_an_object_cannot_be_created_twice_with_other_data(objects: Objects) -> None:
    objects.create("one", b"first")
    for data in (b"second", b"other", b"", b"first and more"):
        with pytest.raises(ObjectExists, match="one"):
            objects.create("one", data)
    assert objects.read("one") == b"first"


def test_the_same_data_again_count_as_created(objects: Objects) -> None:
    objects.create("one", b"first")
    objects.create("one", b"first")
    assert objects.read("one") == b"first"


def test_what_is_missing_is_said_to_be_missing(objects: Objects) -> None:
    with pytest.raises(ObjectMissing, match="none"):
        objects.read("none")
    with pytest.raises(ObjectMissing):
        objects.read_range("none", 0, 1)
    with pytest.raises(ObjectMissing):
        objects.size("a/none")


@pytest.mark.parametrize(("begin", "end"), [(0, 6), (4, 6), (5, 6), (9, 12)])
def test_a_range_beyond_the_end_is_an_error(objects: Objects, begin: int, end: int) -> None:
    objects.create("one", b"01234")
    with pytest.raises(ObjectDamaged, match="one' ends before "):
        objects.read_range("one", begin, end)


def test_a_listing_has_everything_in_a_folder_and_no_neighbour(objects: Objects) -> None:
    before = now_ms() - 2_000
    for name in ("a/two", "a/b/one", "ab/three", "a-b/four", "a/b/c/d/five"):
        objects.create(name, name.encode())
    listed = objects.list_folder("a")
    assert [(each.name, each.bytes) for each in listed] == [("a/b/c/d/five", 12), ("a/b/one", 7), ("a/two", 5)]
    assert all(before <= each.modified_ms <= now_ms() + 2_000 for each in listed)
    assert [each.name for each in objects.list_folder("ab")] == ["ab/three"]
    assert objects.list_folder("none") == []


def test_more_objects_than_a_page_of_a_listing_are_listed(s3_tier: Tier) -> None:
    objects = s3_tier.objects()
    names = [f"many/{number:04}" for number in range(1_005)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: objects.create(name, b""), names))
    assert [each.name for each in objects.list_folder("many")] == names


def test_a_deleted_object_is_gone_and_may_be_deleted_again(objects: Objects) -> None:
    objects.create("one", b"first")
    objects.delete("one")
    objects.delete("one")
    with pytest.raises(ObjectMissing):
        objects.read("one")
    objects.create("one", b"second")
    assert objects.read("one") == b"second"


def test_a_swap_replaces_only_the_version_that_it_names(objects: Objects) -> None:
    objects.create("one", b"first")
    tag = objects.tag("one")
    if tag is None:
        assert isinstance(objects, LocalObjects)
        return
    objects.swap("one", b"second", tag)
    with pytest.raises(ObjectChanged, match="one"):
        objects.swap("one", b"third", tag)
    assert objects.read("one") == b"second"


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "a/.b", "a\0b"])
def test_a_name_stays_below_the_prefix(tier: Tier, name: str) -> None:
    objects = tier.objects()
    with pytest.raises(ValueError, match="is no name of an object"):
        objects.create(name, b"")
    with pytest.raises(ValueError, match="is no name of an object"):
        objects.read(name)


@pytest.mark.parametrize("size", [1, 6 << 20])
def test_of_many_creators_one_wins_and_its_data_stay(atomic_tier: Tier, size: int) -> None:
    objects = atomic_tier.objects()
    for number in range(5):
        name = str(number)
        barrier = threading.Barrier(6)
        won: list[bytes] = []
        threads = [
            threading.Thread(target=create, args=(objects, name, bytes([each]) * size, barrier, won))
            for each in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [objects.read(name)]


def create(objects: Objects, name: str, data: bytes, barrier: threading.Barrier, won: list[bytes]) -> None:
    """Create an object at the same time as others, and note its data if that worked."""
    barrier.wait()
    try:
        objects.create(name, data)
    except ObjectExists:
        return
    won.append(data)


def test_two_prefixes_of_a_bucket_share_nothing(s3_url: str, s3_tier: Tier) -> None:
    other = Tier(s3_tier.url + "x", s3_tier.settings, s3_tier.environ).objects()
    objects = s3_tier.objects()
    objects.create("one", b"first")
    other.create("one", b"second")
    assert objects.read("one") == b"first"
    assert [each.name for each in other.list_folder("one")] == []


class SyncedDisk:
    """Notes what is linked, synced and removed, in order."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self._fsync, self._link = os.fsync, os.link
        patched.setattr(os, "fsync", self.fsync)
        patched.setattr(os, "link", self.link)

    def fsync(self, handle: int) -> None:
        self._fsync(handle)
        self.calls.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))

    def link(self, old: str, new: str) -> None:
        self._link(old, new)
        self.calls.append(("link", new))


def test_a_local_object_is_durable_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path / "tier")
    disk = SyncedDisk(monkeypatch)
    objects = LocalObjects(root)
    objects.create("a/b/one", b"first")
    temporary, *calls = disk.calls[-3:]
    assert temporary[0] == "sync"
    assert temporary[1].startswith(f"{root}/.temporary/")
    assert calls == [("link", f"{root}/a/b/one"), ("sync", f"{root}/a/b")]
    # Each folder that was created is durable in the folder above it.
    assert {path for _, path in disk.calls[:-3]} == {str(tmp_path), root, f"{root}/a"}
    disk.calls.clear()
    objects.create("a/b/one", b"first")
    assert disk.calls[-1] == ("sync", f"{root}/a/b")  # a crash may have come between the link and its sync
    objects.delete("a/b/one")
    assert disk.calls[-1] == ("sync", f"{root}/a/b")
    assert os.listdir(f"{root}/.temporary") == []


def test_a_failed_sync_leaves_no_local_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = LocalObjects(str(tmp_path))

    def fail(handle: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(Exception, match="Input/output error; check the disk"):
            objects.create("one", b"first")
    assert objects.list_folder("one") == []
    assert os.listdir(tmp_path / ".temporary") == []
    objects.create("one", b"first")


def test_temporary_files_of_a_crash_are_removed_when_they_are_old(tmp_path: Path) -> None:
    objects = LocalObjects(str(tmp_path))
    (tmp_path / ".temporary" / "77-1").write_bytes(b"half")
    (tmp_path / ".temporary" / "77-2").write_bytes(b"half")
    os.utime(tmp_path / ".temporary" / "77-1", (1_000, 1_000))
    objects.remove_temporary(1_000_001)
    assert os.listdir(tmp_path / ".temporary") == ["77-2"]


def test_temporary_files_of_a_process_with_the_same_pid_do_no_harm(tmp_path: Path) -> None:
    objects = LocalObjects(str(tmp_path))
    objects.create("zero", b"")
    following = next(LocalObjects._numbers) + 1
    for number in range(following, following + 3):
        (tmp_path / ".temporary" / f"{os.getpid()}-{number}").write_bytes(b"half")
    objects.create("one", b"first")
    assert objects.read("one") == b"first"
    assert len(os.listdir(tmp_path / ".temporary")) == 3


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = LocalObjects(str(tmp_path))
    objects.create("a/one", b"first")

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(AccessRefused, match="Permission denied; give it to the broker"):
        objects.list_folder("a")
