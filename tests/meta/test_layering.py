"""Imports go down the list of rooms only, and outside packages stay in the rooms that may use them."""

from __future__ import annotations

from pathlib import Path

import pytest

import numba_kv
from tests.meta.layering import violations

PACKAGE = Path(numba_kv.__file__).parent


def test_the_package_keeps_its_layers() -> None:
    assert violations(PACKAGE) == []


# file, source, what the complaint has to say
PLANTED = [
    ("errors.py", "import numba_kv.dtypes", "errors imports dtypes"),
    ("geometry.py", "from numba_kv.config import LLMEngineConfig", "geometry imports config"),
    ("geometry.py", "from numba_kv import config", "geometry imports config"),
    ("geometry.py", "from . import plan", "geometry imports plan"),
    ("config/engine.py", "from ..cache.table import KVPageTable", "config imports cache"),
    ("config/engine.py", "def f():\n    from numba_kv.cache import x", "config imports cache"),
    ("config/engine.py", "import typing\nif typing.TYPE_CHECKING:\n    import numba_kv.batch", "config imports batch"),
    ("config/engine.py", "import importlib\nimportlib.import_module('numba_kv.batch')", "config imports batch"),
    ("plan.py", "import numba_kv.ledger.pages", "plan imports ledger"),
    ("ledger/pages.py", "import numba_kv.device", "ledger imports device"),
    ("device/target.py", "import numba_kv.kernels.jit", "device imports kernels"),
    ("cache/table.py", "import numba_kv.batch", "cache imports batch"),
    ("replay/run.py", "from numba_kv import Batch", "only users import the public face"),
    ("replay/run.py", "import numba_kv", "only users import the public face"),
    ("device/target.py", "import numba", "device imports numba"),
    ("cache/table.py", "def f():\n    from numba import cuda", "cache imports numba"),
    ("cache/table.py", "import cuda.core", "cache imports cuda"),
    ("ledger/pages.py", "from cuda.bindings import driver", "ledger imports cuda"),
    ("batch.py", "import torch", "batch imports torch"),
    ("cache/table.py", "from rich.table import Table", "cache imports rich"),
    ("config/engine.py", "import numpy as np", "importing config would import numpy"),
    ("plan.py", "try:\n    import numpy\nexcept ImportError:\n    pass", "importing plan would import numpy"),
    ("dtypes.py", "class A:\n    import ml_dtypes", "importing dtypes would import ml_dtypes"),
    ("__init__.py", "from numba_kv.errors import ConfigError", "importing numba_kv would import numba_kv.errors"),
    ("novelty.py", "", "novelty is a room without a tier"),
]


@pytest.mark.parametrize(("file", "source", "complaint"), PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    found = violations(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]
    assert found[0].startswith(file)


ALLOWED = [
    ("dtypes.py", "def f():\n    import numpy"),
    ("dtypes.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy as np"),
    ("ledger/pages.py", "import numpy as np\nfrom numba_kv.config.engine import LLMEngineConfig"),
    ("kernels/jit.py", "from numba import cuda\nfrom cuda.core import Program\nfrom numba_kv.device import Stream"),
    ("adapters/torch.py", "import torch\nfrom numba_kv.batch import StepView"),
    ("cache/table.py", "from numba_kv.cache.pool import Pool\nfrom . import pool"),
    ("cli.py", "from numba_kv import __version__\nfrom numba_kv.replay import trace\nimport rich"),
    ("__init__.py", "def __getattr__(name):\n    from importlib import import_module"),
]


@pytest.mark.parametrize(("file", "source"), ALLOWED)
def test_what_is_allowed_passes(tmp_path: Path, file: str, source: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    assert violations(tmp_path) == []
