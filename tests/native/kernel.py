"""The native kernel beside its twins in Python: the same call on equal objects must do the same to both."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel_of(twin: Function) -> Function:
    """Return the kernel's function with the name of *twin*. Fails if the kernel is not installed."""
    function: Function = getattr(import_module("martlet_native"), twin.__name__)
    return function
