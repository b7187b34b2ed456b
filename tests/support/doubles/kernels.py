"""Every kernel of the payload, by name."""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from pkgutil import iter_modules
from types import ModuleType

import payload.device
import payload.nn
import payload.optim
from payload.device.base import Kernel
from payload.nn.pool import maximum


def _kernels(*packages: ModuleType) -> dict[str, Kernel]:
    modules = (
        import_module(f"{package.__name__}.{found.name}")
        for package in packages
        for found in iter_modules(package.__path__)
    )
    values = chain.from_iterable(vars(module).values() for module in modules)
    known = chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in values)
    return {kernel.name: kernel for kernel in known if isinstance(kernel, Kernel)}


OF_OPTIMIZERS = _kernels(payload.optim)
_POOLS = {kernel.name: kernel for kernel in map(maximum, (4, 9))}
KERNELS = _kernels(payload.device, payload.nn) | OF_OPTIMIZERS | _POOLS


def known(name: str) -> Kernel:
    """Return the kernel of this name. Those of pooling are made for each size of window."""
    return KERNELS.get(name) or maximum(int(name.removeprefix("maximum_")))
