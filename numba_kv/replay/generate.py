"""A trace of made-up requests: the same seed gives the same requests on every machine.

Knows random numbers of the standard library and nothing else. Chat services see many short and a few very long prompts, which
a log-normal distribution has the shape of; requests arrive independently, so the gaps between them are exponential.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from numba_kv.errors import InputError
from numba_kv.replay.request import Request, Trace

__all__ = ["GeneratorOptions", "generate_requests", "generate_trace"]


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions:
    """What made-up requests look like.

    Attributes
    ----------
    seed : int
        Decides every number.
    requests_per_s : float
        Mean arrivals in a second.
    input_median, output_median : int
        Median tokens of a prompt and of an answer.
    input_sigma, output_sigma : float
        Standard deviation of the logarithm of the tokens; 0: all the same.
    max_total_tokens : int
        Prompt and answer together are cut to this.
    """

    seed: int = 0
    requests_per_s: float = 4.0
    input_median: int = 700
    input_sigma: float = 1.1
    output_median: int = 120
    output_sigma: float = 0.8
    max_total_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("input_median", "output_median"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} tokens; at least 1 is wanted")
        for name in ("input_sigma", "output_sigma"):
            if not 0 <= getattr(self, name) <= 8:
                raise InputError(f"{name}: {getattr(self, name)} is not in 0..8")
        if not 0 < self.requests_per_s < math.inf:
            raise InputError(f"requests_per_s: {self.requests_per_s} is not a positive number")
        if self.max_total_tokens < 2:
            raise InputError(f"max_total_tokens: {self.max_total_tokens}; at least 2 are wanted, one in and one out")


def generate_requests(options: GeneratorOptions) -> Iterator[Request]:
    """Yield requests without end, in the order of their arrival."""
    # A string seed is hashed the same way everywhere, also for negative numbers (`Random(-1)` equals `Random(1)`).
    source = random.Random(f"numba_kv trace {options.seed}")
    arrival_s = 0.0
    while True:
        wanted_in = source.lognormvariate(math.log(options.input_median), options.input_sigma)
        wanted_out = source.lognormvariate(math.log(options.output_median), options.output_sigma)
        input_tokens = min(max(1, round(wanted_in)), options.max_total_tokens - 1)
        output_tokens = min(max(1, round(wanted_out)), options.max_total_tokens - input_tokens)
        yield Request(arrival_s, input_tokens, output_tokens)
        arrival_s += source.expovariate(options.requests_per_s)


def generate_trace(num_requests: int, options: GeneratorOptions | None = None) -> Trace:
    """Return a trace of `num_requests` made-up requests.

    Raises
    ------
    InputError
        If `num_requests` is below 1.
    """
    if num_requests < 1:
        raise InputError(f"num_requests: {num_requests}; at least 1 is wanted")
    chosen = options or GeneratorOptions()
    requests = tuple(islice(generate_requests(chosen), num_requests))
    return Trace(f"generated:{chosen.seed}", "generated", requests)
