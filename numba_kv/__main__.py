"""``python -m numba_kv``: the command `numba-kv`."""

import sys

from numba_kv.cli import main

if __name__ == "__main__":
    sys.exit(main())
