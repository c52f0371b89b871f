"""Coverage-guided fuzzing of the native kernel beside its twins in Python.

    pip install atheris
    python -m tests.fuzz.kernel -max_len=8192 -len_control=0 -max_total_time=600

Drives the tests of `tests/native` that compare both over generated input; what their Python side executes guides the
choice of the next input. A difference, an error that only one of them raises, and a crash are defects.
"""

import inspect
import pkgutil
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import atheris

with atheris.instrument_imports(
    include=[
        "martlet",
        "martlet_columns",
        "martlet_filter_sql92",
        "martlet_mqtt",
        "martlet_remoting",
        "martlet_stomp",
        "martlet_spark",
    ]
):
    import tests.native

    MODULES: Final = [
        import_module(f"tests.native.{found.name}")
        for found in pkgutil.iter_modules(tests.native.__path__)
        if found.name.startswith("test_")
    ]


def _is_target(test: Any) -> bool:
    """Return whether *test* takes nothing but generated input."""
    return hasattr(test, "hypothesis") and not inspect.signature(test).parameters


TARGETS: Final[list[Callable[[bytes], object]]] = [
    test.hypothesis.fuzz_one_input
    for module in MODULES
    for name, test in sorted(vars(module).items())
    if name.startswith("test_") and _is_target(test)
]


def one_input(data: bytes) -> None:
    """Run one comparison on the rest of *data*; the first byte says which."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


if __name__ == "__main__":
    print(f"{len(TARGETS)} comparisons", file=sys.stderr)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
