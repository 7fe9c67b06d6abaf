"""Continuous batching in numba_kv alone, with an attention kernel of its own that reads `view.block_tables`.

python examples/decode_loop.py        (on a GPU the kernel is compiled for it, elsewhere for the processor)

The model is a toy with random weights: what counts is how a step's tables and slots are used. Three prompts share two rows;
when a sequence has its tokens, its row goes to the next prompt. At the end every token is compared with plain attention.
"""

import math
import warnings

import numba
import numpy as np

import numba_kv as kv

HEADS, DIM, VOCAB, WINDOW, NEW = 2, 16, 64, 24, 40
PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 8], list(range(40))]


def attend(item, q, k_pages, v_pages, table, lengths, starts, window, out):
    """Attention of one head of one row: item = row * heads + head. Positions lead to pages through the row's table."""
    heads, page = q.shape[1], k_pages.shape[1]
    row, head = item // heads, item % heads
    first, stop = starts[row], starts[row + 1]
    for token in range(first, stop):  # none in a row that is empty
        position = lengths[row] - (stop - token)
        low = max(0, position - window + 1) if window else 0
        best, total = -math.inf, 0.0
        for channel in range(q.shape[2]):
            out[token, head, channel] = 0.0
        for key in range(low, position + 1):
            place, offset = table[row, key // page], key % page
            score = 0.0
            for channel in range(q.shape[2]):
                score += q[token, head, channel] * k_pages[place, offset, head, channel]
            top = max(best, score)
            shrink, weight = math.exp(best - top), math.exp(score - top)
            for channel in range(q.shape[2]):
                value = weight * v_pages[place, offset, head, channel]
                out[token, head, channel] = shrink * out[token, head, channel] + value
            best, total = top, shrink * total + weight
        for channel in range(q.shape[2]):
            out[token, head, channel] /= total


def compiled(device):
    """Return ``launch(items, *arrays)`` for a device, and what makes its arrays of tensors."""
    if device.target != "cuda":
        body = numba.njit(attend)

        @numba.njit
        def loop(items, *arrays):
            for item in range(items):
                body(item, *arrays)

        return loop, kv.Tensor.numpy
    from numba import cuda

    warnings.filterwarnings("ignore", message=".*under-utilization")  # two rows do not fill a GPU
    body, stream = cuda.jit(attend, device=True), cuda.external_stream(device.stream.handle)

    @cuda.jit
    def kernel(items, q, k_pages, v_pages, table, lengths, starts, window, out):
        item = cuda.grid(1)
        if item < items:
            body(item, q, k_pages, v_pages, table, lengths, starts, window, out)

    def launch(items, *arrays):
        kernel[-(-items // 32), 32, stream](items, *arrays)

    return launch, cuda.as_cuda_array


class Toy:
    """Two layers, full and sliding, over the caches of a batch."""

    def __init__(self, batch, io):
        self.caches, self.io = batch.resources.cache_managers[0], io
        random, size = np.random.default_rng(0), HEADS * DIM
        self.embeddings, self.head = random.normal(size=(2, VOCAB, size)).astype(np.float32)
        self.weights = (random.normal(size=(2, 3, size, size)) / math.sqrt(size)).astype(np.float32)
        device = batch.resources.device
        self.launch, as_array = compiled(device)
        most = batch.plan.config.max_batch_tokens
        self.dense = [device.tensor((most, HEADS, DIM), kv.dtype("float32")) for _ in range(4)]  # q, k, v, out
        self.arrays, buffers = {}, self.caches.step_buffers
        for layer in range(2):  # addresses never change, so the kernel's arrays are made once
            group = self.caches.storage(layer).group
            fixed = self.caches.k(layer), self.caches.v(layer), buffers.block_tables[group], buffers.seq_lens
            self.arrays[layer] = [as_array(t) for t in (*fixed, buffers.cu_seqlens_q)]
        self.q, self.out = as_array(self.dense[0]), as_array(self.dense[3])

    def forward(self, view, tokens):
        """Return the hidden states [T, HEADS * DIM] of a step's tokens."""
        x = self.embeddings[tokens]
        for layer in range(2):
            q, k, v, out = (t[: len(tokens)] for t in self.dense)
            for tensor, weight in zip((q, k, v), self.weights[layer], strict=True):
                tensor.fill_from(np.tanh(x @ weight).reshape(-1, HEADS, DIM))
            self.io.write(layer, k, v, view)
            window = self.caches.storage(layer).window.tokens  # 0: full attention
            self.launch(view.num_rows * HEADS, self.q, *self.arrays[layer], window, self.out)
            x = x + out.to_host().reshape(x.shape)
        return x

    def dense_forward(self, tokens):
        """Return the same without caches."""
        x, n = self.embeddings[tokens], len(tokens)
        for layer, window in enumerate((n, WINDOW)):
            q, k, v = (np.tanh(x @ w).reshape(-1, HEADS, DIM) for w in self.weights[layer])
            scores = np.einsum("qhd,khd->hqk", q, k)
            gap = np.arange(n)[:, None] - np.arange(n)
            scores[:, (gap < 0) | (gap >= window)] = -np.inf
            weights = np.exp(scores - scores.max(2, keepdims=True))
            x = x + np.einsum("hqk,khd->qhd", weights / weights.sum(2, keepdims=True), v).reshape(n, -1)
        return x


full, sliding = (
    kv.AttentionLayer(num_kv_heads=HEADS, head_dim=DIM, window=w) for w in (kv.Window("full"), kv.Window("sliding", WINDOW))
)
config = kv.LLMEngineConfig(
    layers=(full, sliding), max_batch_size=2, max_kv_cache_capacity=128, kv_cache_dtype="float32",
    max_step_tokens=16, max_batch_tokens=32,  # prompts are appended 16 tokens a step: then every key is in pages
)  # fmt: skip

with kv.SharedResources.create_for_llm(config) as res, kv.Batch(res) as batch, kv.KVIO(res.cache_managers[0]) as io:
    toy, waiting, finished, texts = Toy(batch, io), list(PROMPTS), [], {}
    while waiting or batch.sequences:
        while waiting and batch.free_rows:
            prompt = waiting.pop(0)
            texts[batch.admit(prompt)] = list(prompt)
        counts = {s: min(16, len(texts[s]) - s.length) for s in batch.sequences}  # a chunk of a prompt, or one token
        view = batch.step(counts)
        given = [texts[s][s.length - n : s.length] for s, n in counts.items()]  # row after row
        last = toy.forward(view, sum(given, []))[np.cumsum(list(counts.values())) - 1]
        for sequence, token in zip(counts, (last @ toy.head.T).argmax(1).tolist(), strict=True):
            if sequence.length == len(texts[sequence]):  # else more of its prompt comes first
                texts[sequence].append(token)
        for sequence in [s for s in batch.sequences if len(texts[s]) == s.prompt_tokens + NEW]:
            finished.append(texts.pop(sequence))
            batch.retire(sequence)
    batch.audit()
    ring = batch.plan.groups[1].ring
    print(f"{batch.stats.steps} steps on {res.device.target}; a row never held more than {ring} pages of the sliding layer")

for text in finished:
    prompt = len(text) - NEW
    states = toy.dense_forward(text[:-1])
    assert (states @ toy.head.T).argmax(1)[prompt - 1 :].tolist() == text[prompt:]
    print(*text[prompt:])
print("the same tokens as without caches")
