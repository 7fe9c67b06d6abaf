"""FlashInfer over numba_kv's pages: one plan a window group and step, one run a layer, compared with the library's own kernel.

pip install -e ".[interop,flashinfer]"
python examples/flashinfer_wrappers.py

Without a GPU or without FlashInfer it prints what `plan()` would get.
"""

import contextlib
import importlib.util

try:
    import torch
except ImportError:
    print('skipped: torch is not installed (pip install -e ".[interop]")')
    raise SystemExit from None

import numba_kv as kv
from numba_kv.adapters.flashinfer import FlashInfer

HEADS, Q_HEADS, DIM, WINDOW, WORKSPACE_NBYTES = 2, 8, 64, 256, 128 << 20
is_cuda = kv.target() == "cuda" and torch.cuda.is_available()
runs = is_cuda and importlib.util.find_spec("flashinfer") is not None

full, sliding = (
    kv.AttentionLayer(num_kv_heads=HEADS, head_dim=DIM, window=w) for w in (kv.Window("full"), kv.Window("sliding", WINDOW))
)
config = kv.LLMEngineConfig(
    layers=(full, full, sliding, sliding), max_batch_size=4, max_kv_cache_capacity=2048,
    max_step_tokens=128, max_batch_tokens=512,  # prompts are appended 128 tokens a step: then every key is in pages
)  # fmt: skip
place, stream = ("cuda", torch.cuda.Stream()) if is_cuda else ("cpu", None)  # one stream for torch and the caches

with (
    torch.cuda.stream(stream) if is_cuda else contextlib.nullcontext(),
    kv.SharedResources.create_for_llm(config, target=place, stream=stream) as res,
    kv.Batch(res) as batch,
    kv.KVIO(res.cache_managers[0]) as io,
):
    reference, infer = kv.PagedAttention(res.cache_managers[0], io), FlashInfer(batch, io=io)
    wrappers = {}  # a pair for each group
    if runs:
        import flashinfer

        for group in range(2):
            space = torch.zeros(WORKSPACE_NBYTES, dtype=torch.uint8, device=place)
            decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, infer.kv_layout)
            wrappers[group] = decode, flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, infer.kv_layout)
    prompts, worst = batch.update(admit=[700, 90, 300]), 0.0
    while prompts[0].length < 720:
        view = batch.step({s: min(128, s.pending_tokens) or 1 for s in batch.sequences})
        step, is_decode = infer.step(view), view.max_query_tokens == 1
        for layer in range(4):
            group, starts_group = layer // 2, layer % 2 == 0
            q, k, v = (  # what a model would compute
                torch.randn(view.num_tokens, heads, DIM, dtype=torch.bfloat16, device=place)
                for heads in (Q_HEADS, HEADS, HEADS)
            )
            io.write(layer, k, v, view)
            plan = (step.decode_plan if is_decode else step.prefill_plan)(layer, Q_HEADS)
            if runs:
                wrapper = wrappers[group][0 if is_decode else 1]
                if starts_group:  # the other layer of the group shares the plan
                    wrapper.plan(**plan)
                out, expected = wrapper.run(q, step.kv(layer)), torch.empty_like(q)
                reference.attend(layer, q, expected, view)
                worst = max(worst, (out - expected).abs().max().item())
            elif starts_group and is_decode and prompts[0].length == 719:
                print(f"decode plan of layers {layer} and {layer + 1}:")
                for name, value in plan.items():
                    print(f"  {name:14}", f"{tuple(value.shape)} {value.device}" if isinstance(value, torch.Tensor) else value)
    if runs:
        assert worst < 0.05
        print(f"{batch.stats.steps} steps, at most {worst:.4f} away from numba_kv's own attention")
    else:
        print(f"skipped: {'FlashInfer is not installed' if is_cuda else 'there is no CUDA device here'}")
