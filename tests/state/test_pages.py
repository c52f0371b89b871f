"""A table in pages is a dict whose frozen state stays as it was."""

from random import Random

import pytest

from martlet.state import Pages
from martlet.state.pages import PAGE_ENTRIES


@pytest.mark.parametrize("seed", range(5))
def test_it_does_what_a_dict_does_and_frozen_states_stay(seed: int) -> None:
    random = Random(seed)
    pages, model = Pages[int, int](), dict[int, int]()
    frozen = []
    for step in range(20_000):
        key = random.randrange(4 * PAGE_ENTRIES)
        if random.random() < 0.4 and key in model:
            del pages[key], model[key]
        else:
            pages[key] = model[key] = step
        if step % 2000 == 999:
            frozen.append((pages.freeze(), list(model.items())))
    assert len(pages) == len(model)
    assert list(pages) == list(model)
    assert list(pages.items()) == list(model.items())
    assert list(pages.values()) == list(model.values())
    assert [pages.get(key) for key in range(5000)] == [model.get(key) for key in range(5000)]
    assert [(key in pages) for key in range(5000)] == [(key in model) for key in range(5000)]
    assert all(list(entries) == then for entries, then in frozen)


def test_a_key_that_is_not_there_is_an_error_or_the_default() -> None:
    pages = Pages[str, int]()
    pages["a"] = 1
    assert (pages["a"], pages.get("b", 7)) == (1, 7)
    with pytest.raises(KeyError):
        pages["b"]
    with pytest.raises(KeyError):
        del pages["b"]
    del pages["a"]
    assert (len(pages), list(pages.freeze())) == (0, [])


def test_a_change_after_freezing_copies_one_page() -> None:
    pages = Pages[int, int]()
    for number in range(100 * PAGE_ENTRIES):
        pages[number] = number
    before = list(pages._pages.values())
    pages.freeze()
    pages[0] = -1
    pages[1] = -1
    copied = [after is not page for page, after in zip(before, pages._pages.values(), strict=True)]
    assert sum(copied) == 1
