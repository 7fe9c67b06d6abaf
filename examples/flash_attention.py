"""FlashAttention over numba_kv's pages: a chunk of prompts, then decode steps, compared with the library's own kernel.

pip install -e ".[interop]"     (and FlashAttention by its own instructions, or vLLM; else the kernels that torch has are used)
python examples/flash_attention.py

Without a GPU or such kernels it prints the arguments that the function would get.
"""

import contextlib

try:
    import torch
except ImportError:
    print('skipped: torch is not installed (pip install -e ".[interop]")')
    raise SystemExit from None

import numba_kv as kv
from numba_kv.adapters.flash_attention import FlashAttention, is_installed

HEADS, Q_HEADS, DIM, WINDOW = 2, 8, 64, 256
pages = {"fa3": 16, "vllm_fa3": 16, "vllm_fa2": 16, "fa4": 128, "fa2": 256, "torch": 256}  # page_tokens that suit each version
is_cuda = kv.target() == "cuda" and torch.cuda.is_available()
version = next((v for v in pages if is_cuda and is_installed(v)), "fa3")
runs = is_cuda and is_installed(version)

full, sliding = (
    kv.AttentionLayer(num_kv_heads=HEADS, head_dim=DIM, window=w) for w in (kv.Window("full"), kv.Window("sliding", WINDOW))
)
config = kv.LLMEngineConfig(
    layers=(full, sliding), max_batch_size=4, max_kv_cache_capacity=2048, page_tokens=pages[version],
    max_step_tokens=128, max_batch_tokens=512,  # prompts are appended 128 tokens a step: then every key is in pages
)  # fmt: skip

place, stream = ("cuda", torch.cuda.Stream()) if is_cuda else ("cpu", None)  # one stream for torch and the caches

with (
    torch.cuda.stream(stream) if is_cuda else contextlib.nullcontext(),
    kv.SharedResources.create_for_llm(config, target=place, stream=stream) as res,
    kv.Batch(res) as batch,
    kv.KVIO(res.cache_managers[0]) as io,
):
    reference, flash = kv.PagedAttention(res.cache_managers[0], io), FlashAttention(batch, version, io=io)
    prompts, worst = batch.update(admit=[700, 90, 300]), 0.0
    while prompts[0].length < 720:
        view = batch.step({s: min(128, s.pending_tokens) or 1 for s in batch.sequences})
        step = flash.step(view)
        for layer in range(2):
            q, k, v = (  # what a model would compute
                torch.randn(view.num_tokens, heads, DIM, dtype=torch.bfloat16, device=place)
                for heads in (Q_HEADS, HEADS, HEADS)
            )
            io.write(layer, k, v, view)
            if runs:
                out, expected = step.attend(layer, q), torch.empty_like(q)
                reference.attend(layer, q, expected, view)
                out = out[0] if isinstance(out, tuple) else out
                worst = max(worst, (out - expected).abs().max().item())
    if runs:
        assert worst < 0.05
        print(f"{version}: {batch.stats.steps} steps, at most {worst:.4f} away from numba_kv's own attention")
    else:
        print(f"skipped: {'FlashAttention is not installed' if is_cuda else 'there is no CUDA device here'}")
        for layer in range(2):
            print(f"arguments of {version} for layer {layer}:")
            for name, value in step.ragged(layer).items():
                print(f"  {name:14}", f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else value)
