"""A whole decode step in one CUDA graph of torch: bookkeeping, window rotation, the model and the choice of the next token.

pip install -e ".[interop]"
python examples/torch_cuda_graph.py

Without CUDA the step is recorded as a list of calls instead, and torch runs eagerly behind it on the processor.
"""

import contextlib

try:
    import torch
except ImportError:
    print('skipped: torch is not installed (pip install -e ".[interop]")')
    raise SystemExit from None

import numba_kv as kv
from numba_kv.adapters.torch_arrays import to_torch

ROWS, HEADS, DIM, VOCAB, WINDOW, CAPACITY, STEPS = 4, 2, 32, 128, 48, 256, 100
is_cuda = kv.target() == "cuda" and torch.cuda.is_available()
place = "cuda" if is_cuda else "cpu"


class Toy(torch.nn.Module):
    """A full and a sliding layer with random weights. It reads tensors at fixed addresses, so that a graph can hold it."""

    def __init__(self, batch):
        super().__init__()
        caches = batch.resources.cache_managers[0]
        buffers = caches.step_buffers
        self.lengths, self.layers = to_torch(buffers.seq_lens), []
        for layer in range(2):
            storage = caches.storage(layer)
            pools = [to_torch(half).flatten(0, 1) for half in (caches.k(layer), caches.v(layer))]  # [slots, H, D]
            table, slots = to_torch(buffers.block_tables[storage.group]), to_torch(buffers.slot_mapping[storage.group])[:ROWS]
            seen = torch.arange(storage.window.tokens or CAPACITY, device=place)
            self.layers.append((*pools, table, slots, seen, storage.page_tokens))
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCAB, HEADS * DIM, device=place)
        self.project = torch.nn.ModuleList(torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM, device=place) for _ in range(2))
        self.head = torch.nn.Linear(HEADS * DIM, VOCAB, device=place)

    def forward(self, tokens):
        """Return the token that follows each of `tokens` [ROWS]; writes their K and V."""
        x = self.embed(tokens)
        for project, (k_pool, v_pool, table, slots, seen, page) in zip(self.project, self.layers, strict=True):
            q, k, v = project(x).view(ROWS, 3, HEADS, DIM).unbind(1)
            k_pool.index_copy_(0, slots, k.to(k_pool.dtype))
            v_pool.index_copy_(0, slots, v.to(v_pool.dtype))
            positions = self.lengths[:, None] - 1 - seen  # the keys that a row sees, the newest first
            pages = table.gather(1, (positions.clamp(min=0) // page).long())
            places = pages * page + positions.clamp(min=0) % page
            keys, values = (pool[places].transpose(1, 2).float() for pool in (k_pool, v_pool))
            visible = (positions >= 0)[:, None, None]
            out = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=visible)
            x = x + out.reshape(ROWS, -1)
        return self.head(x).argmax(-1)


def first_steps(batch):
    """Start every row with one token of its own, and run three steps as they come; torch loads its kernels on the way."""
    batch.clear()
    batch.update(admit=[1] * ROWS)
    tokens, found = torch.arange(ROWS, device=place), []
    for _ in range(3):
        batch.step({s: 1 for s in batch.sequences})
        tokens.copy_(toy(tokens))
        found.append(tokens.tolist())
    return tokens, found


full, sliding = (
    kv.AttentionLayer(num_kv_heads=HEADS, head_dim=DIM, window=w) for w in (kv.Window("full"), kv.Window("sliding", WINDOW))
)
config = kv.LLMEngineConfig(layers=(full, sliding), max_batch_size=ROWS, max_kv_cache_capacity=CAPACITY)
stream = torch.cuda.Stream() if is_cuda else None

with (
    torch.no_grad(),
    torch.cuda.stream(stream) if is_cuda else contextlib.nullcontext(),
    kv.SharedResources.create_for_llm(config, target=place, stream=stream) as res,
    kv.Batch(res) as batch,
):
    toy = Toy(batch)

    tokens, expected = first_steps(batch)  # step by step, with the host in between
    for _ in range(STEPS):
        batch.step(1)
        tokens.copy_(toy(tokens))
        expected.append(tokens.tolist())

    tokens, found = first_steps(batch)
    history = torch.zeros(STEPS, ROWS, dtype=torch.long, device=place)
    count = torch.zeros(1, dtype=torch.long, device=place)
    count.add_(1).zero_()  # every kernel of torch is loaded before a capture

    def model():
        """Choose the next tokens and note them."""
        tokens.copy_(toy(tokens))
        history.index_copy_(0, count, tokens[None])
        count.add_(1)

    if is_cuda:
        graph = torch.cuda.CUDAGraph()
        batch.reserve(STEPS)  # pages of all steps: the host is not asked again
        with torch.cuda.graph(graph, stream=stream):
            batch.enqueue_step(stream)  # lengths, rotation, slots
            model()
        for _ in range(STEPS):
            graph.replay()
        batch.advanced(STEPS)
        print(f"{STEPS} replays of one CUDA graph")
    else:
        captured = batch.capture()
        captured.reserve(STEPS)
        for _ in range(STEPS):
            captured.launch()
            model()
        captured.advanced()
        print(f"{STEPS} launches of a recorded step; there is no CUDA device here")

    assert found + history.tolist() == expected
    batch.audit()
    ring = batch.plan.groups[1].ring
    print(f"{batch.sequences[0].length} tokens a row, at most {ring} pages of the sliding layer; as step by step")
