"""Refusals in the words of the command line.

Knows which option stands for which argument of the package, and that people read bytes with a unit. Does not know what was
wrong. What a message says about a key of a file stays as it is: the file has that key, not the command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from numba_kv.errors import NumbaKVError, PlanError
from numba_kv.replay.sizes import format_bytes

__all__ = ["in_options"]

_OPTIONS = {
    "max_batch_size": "--batch",
    "max_kv_cache_capacity": "--capacity",
    "page_tokens": "--page-tokens",
    "kv_cache_dtype": "--dtype",
    "max_step_tokens": "--max-step-tokens",
    "max_batch_tokens": "--max-batch-tokens",
    "memory_bytes": "--memory",
}
#: Where a command has no option for an argument, but makes it of others.
_MADE_OF: Mapping[str, Mapping[str, str]] = {
    "replay": {"max_batch_tokens": "--batch + --chunk"},
    "inspect": {"max_batch_tokens": "--batch + the sum of --tokens"},
    "bench": {"max_batch_tokens": "--batch x 600 tokens", "max_kv_cache_capacity": "--repeat + 650"},
}
_ARGUMENT = re.compile(rf"(?<![\w./\\'\"-])(?:{'|'.join(_OPTIONS)})(?![\w./\\'\"])")
#: Only these say something by their first word alone.
_FIRST_WORDS = re.compile(r"(memory|target)(?=: )")
#: Readers of a file begin with its name and dialect; what they advise to pass is an argument all the same.
_OF_A_FILE = re.compile(r"\((?:Hugging Face|Edge-LLM)\): ")
_ADVICE = re.compile(r"\bpass (\w+)")
_BYTES = re.compile(r"\b(\d{4,}) bytes\b")
_LARGE = re.compile(r"\b(\d{4,})\b(?! rows)(?: bytes)?")


def in_options(error: NumbaKVError, command: str | None) -> str:
    """Return the message of `error` on one line, with options for arguments and a readable unit beside bytes.

    Parameters
    ----------
    error : NumbaKVError
        What the package raised.
    command : str or None
        Name of the command that ran.
    """
    text = " ".join(str(error).split())
    options = {**_OPTIONS, **_MADE_OF.get(command or "", {})}
    if _OF_A_FILE.search(text):
        text = _ADVICE.sub(lambda found: f"pass {options.get(found[1], found[1])}", text)
    else:
        text = _FIRST_WORDS.sub(r"--\1", text, count=1) if _FIRST_WORDS.match(text) else text
        text = _ARGUMENT.sub(lambda found: options[found[0]], text)
    if isinstance(error, PlanError) and error.needed_bytes:
        # Every number before the advice counts bytes, but for the rows.
        figures, semicolon, advice = text.partition(";")
        return _LARGE.sub(_with_unit, figures) + semicolon + advice
    return _BYTES.sub(_with_unit, text)


def _with_unit(found: re.Match[str]) -> str:
    return f"{int(found[1]):,} bytes ({format_bytes(int(found[1]))})"
