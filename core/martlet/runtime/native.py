"""The native kernel: functions in Rust that replace inner loops in Python.

The distribution ``martlet-native`` is optional. Each of its functions has a twin in Python with the same name, the same
arguments and the same results. The twin defines what the function does, and is used where the kernel is not installed
or is switched off. Both stop before anything that is not usual, which other Python code handles.
"""

import logging
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias, TypeVar, final

from martlet.errors import ConfigError
from martlet.runtime.installed import installed_version

__all__ = ["Mode", "kernel_name", "native", "use_kernel"]

logger = logging.getLogger("martlet")

Function = TypeVar("Function", bound=Callable[..., Any])

Mode: TypeAlias = Literal["auto", "require", "off"]
MODULE: Final = "martlet_native"
# If this variable is "off", "auto" means "off": for programs without a configuration, and for tests.
VARIABLE: Final = "MARTLET_NATIVE"
INSTALL: Final = "pip install 'martlet[native]'"


@final
class _Kernel:
    """The kernel that is in use; without one, ``missing`` says why."""

    def __init__(self) -> None:
        self.module: ModuleType | None = None
        self.missing = ""
        self.is_chosen = False

    def choose(self, mode: Mode) -> None:
        self.is_chosen, self.module = True, None
        if mode == "off" or (mode == "auto" and os.environ.get(VARIABLE) == "off"):
            self.missing = "switched off"
            return
        try:
            module = import_module(MODULE)
        except ImportError as error:
            self.missing = f"not installed ({error}); install it with: {INSTALL}"
            return
        version, wanted = str(module.__version__), installed_version()
        if version == wanted:
            self.module, self.missing = module, ""
        else:
            self.missing = f"of version {version}, but Martlet is {wanted}; install its own with: {INSTALL}"
            if mode == "auto":
                logger.warning("the native kernel is not used: it is %s", self.missing)


_kernel: Final = _Kernel()


def use_kernel(mode: Mode) -> None:
    """Choose whether objects that are created from now on use the kernel.

    Raises:
      ConfigError: *mode* is ``require``, and there is no kernel of this version.
    """
    _kernel.choose(mode)
    if mode == "require" and _kernel.module is None:
        raise ConfigError(f"broker.native is 'require', but the native kernel is {_kernel.missing}")


def kernel_name() -> str:
    """Return ``native`` or ``python``: what runs the inner loops."""
    return "python" if _chosen() is None else "native"


def native(twin: Function) -> Function:
    """Return the kernel's function with the name of *twin*; *twin* itself if the kernel is not in use."""
    found: Function = getattr(_chosen(), twin.__name__, twin)
    return found


def _chosen() -> ModuleType | None:
    if not _kernel.is_chosen:
        _kernel.choose("auto")
    return _kernel.module
