"""torch, and that it and a transformers that is new enough are installed: for the modules that a program imports first."""

from __future__ import annotations

import re

from numba_kv.errors import InteropError

try:
    import torch as torch
    import transformers as transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"numba_kv.adapters for transformers models need {error.name}: pip install 'numba-kv[interop]'", name=error.name
    ) from error

__all__ = ["torch", "transformers"]

#: The first whose caches take `cache=`.
_OLDEST = (5, 24)
_found = re.match(r"(\d+)\.(\d+)", transformers.__version__)
if _found is not None and (int(_found[1]), int(_found[2])) < _OLDEST:
    raise InteropError(
        f"transformers {transformers.__version__} is installed; numba_kv.adapters need {_OLDEST[0]}.{_OLDEST[1]} or newer: "
        "pip install -U 'numba-kv[interop]'"
    )
