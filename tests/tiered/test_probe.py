"""A store that cannot keep two brokers apart is refused at the start."""

from uuid import uuid4

import pytest

from martlet_tiered.config import TieredConfig
from martlet_tiered.credentials import Credentials
from martlet_tiered.errors import ObjectChanged, ObjectExists, StoreUnusable
from martlet_tiered.local import LocalObjects
from martlet_tiered.location import TierLocation
from martlet_tiered.opening import probe
from martlet_tiered.remote import RemoteObjects

from .cold import Tier, append
from .stores import Faulty


def test_a_store_with_conditional_writes_passes_and_keeps_nothing(tier: Tier) -> None:
    objects = tier.objects()
    probe(objects, "one")
    probe(objects, "one")
    assert objects.list_folder("probe") == []


def test_memory_passes() -> None:
    objects = RemoteObjects(TierLocation("memory:///", Credentials({}), {}), TieredConfig(url="memory:///"))
    probe(objects, "one")
    assert objects.list_folder("probe") == []


def test_a_store_that_ignores_the_condition_is_refused(faulty: Faulty, faulty_tier: Tier) -> None:
    faulty.without = ("if-none-match",)
    with pytest.raises(StoreUnusable, match=r"lets a second writer replace .*unsafe_single_writer = true"):
        faulty_tier.objects()
    faulty.without = ("if-match",)
    with pytest.raises(StoreUnusable, match="replaces an old version of an object"):
        faulty_tier.objects()
    faulty.without = ()
    assert faulty_tier.objects().list_folder("probe") == []


def test_a_single_writer_may_use_it_if_the_settings_say_so(faulty: Faulty, faulty_tier: Tier) -> None:
    faulty.without = ("if-none-match", "if-match")
    objects = faulty_tier.objects(unsafe_single_writer=True)
    objects.create("one", b"first")
    objects.create("one", b"first")
    with pytest.raises(ObjectExists):
        objects.create("one", b"second")
    assert objects.read("one") == b"first"
    table = faulty_tier.owned(unsafe_single_writer=True)
    append(table, objects, 0, 5)
    append(table, objects, 5, 9)
    assert table.end == 9
    assert objects.list_folder("probe") == []


def test_the_setting_changes_nothing_for_a_good_store(tier: Tier) -> None:
    objects = tier.objects(unsafe_single_writer=True)
    objects.create("one", b"first")
    if isinstance(objects, RemoteObjects):
        assert not objects._unconditional
    else:
        assert isinstance(objects, LocalObjects)


def test_a_store_that_knows_no_conditions_is_refused(faulty: Faulty, faulty_tier: Tier) -> None:
    objects = faulty_tier.objects()
    faulty.answer = (501, b"<Error><Code>NotImplemented</Code></Error>")
    with pytest.raises(StoreUnusable, match=r"501 NotImplemented.; use a store with conditional writes"):
        objects.create("one", b"first")


class Lying:
    """Objects of memory with one method that does not keep its promise."""

    url = "lying"
    can_tear = False

    def __init__(self, promise: str) -> None:
        self.promise = promise
        self.data: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> None:
        exists = name in self.data
        if not exists or self.promise in ("create", "late"):
            self.data[name] = data
        if exists and self.promise != "create":
            raise ObjectExists(name)

    def read(self, name: str) -> bytes:
        return self.data[name]

    def tag(self, name: str) -> str | None:
        return self.data[name].decode()

    def swap(self, name: str, data: bytes, tag: str) -> None:
        is_old = tag != self.tag(name)
        if (not is_old and self.promise != "no swap") or self.promise in ("swap", "late swap"):
            self.data[name] = data
        if self.promise == "no swap" or (is_old and self.promise != "swap"):
            raise ObjectChanged(name)

    def delete(self, name: str) -> None:
        del self.data[name]


@pytest.mark.parametrize(
    ("promise", "why"),
    [
        ("create", "lets a second writer replace"),
        ("late", "refuses to replace an object, and does it nevertheless"),
        ("swap", "replaces an old version"),
        ("late swap", "replaces an old version"),
        ("no swap", "refuses to replace the version that an object has"),
    ],
)
def test_each_broken_promise_is_noticed(promise: str, why: str) -> None:
    objects = Lying(promise)
    with pytest.raises(StoreUnusable, match=why):
        probe(objects, uuid4().hex)  # type: ignore[arg-type]
    assert objects.data == {}


def test_honest_objects_pass() -> None:
    objects = Lying("")
    probe(objects, "one")  # type: ignore[arg-type]
    assert objects.data == {}
