"""torch, and that it and transformers are installed: for the modules that a program imports first."""

from __future__ import annotations

try:
    import torch as torch
    import transformers as transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"numba_kv.adapters for transformers models need {error.name}: pip install 'numba-kv[interop]'", name=error.name
    ) from error

__all__ = ["torch", "transformers"]
