"""Counters of a batch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchStats"]


@dataclass
class BatchStats:
    """What a batch has done so far.

    Attributes
    ----------
    steps, decode_steps : int
        All steps; those that appended equally to every row with nothing else changed.
    tokens : int
        Tokens appended.
    launches : int
        Kernels enqueued.
    admitted, retired, rewinds : int
        Calls that succeeded, in sequences; those forked or swapped in are admitted too, those swapped out retired.
    forked, swapped_out, swapped_in : int
        Of these.
    copied_pages : int
        Pages copied to forks, and for reuse of context; counted once for all layers of a group.
    swapped_out_bytes, swapped_in_bytes : int
        K and V moved to host memory and back.
    kept_out_bytes, kept_in_bytes : int
        What is kept for reuse, moved to host memory and back.
    bytes_to_device : int
        Bytes sent by steps and composition changes.
    steady_bytes_to_device : int
        Of these, bytes sent by decode steps that changed no row and mapped no page.
    page_blocks : int
        Steps that mapped pages ahead.
    rotated_pages : int
        Pages that windows of retired sequences have left.
    """

    steps: int = 0
    decode_steps: int = 0
    tokens: int = 0
    launches: int = 0
    admitted: int = 0
    retired: int = 0
    rewinds: int = 0
    forked: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    copied_pages: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    kept_out_bytes: int = 0
    kept_in_bytes: int = 0
    bytes_to_device: int = 0
    steady_bytes_to_device: int = 0
    page_blocks: int = 0
    rotated_pages: int = 0
