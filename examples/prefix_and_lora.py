"""A system prompt that is computed once, and sequences that compute with LoRA adapters of their own.

python examples/prefix_and_lora.py

No model runs here: the program shows which tokens are left to compute, and which adapter the rows and the engine's inputs have.
"""

from dataclasses import replace

import numpy as np

import numba_kv as kv

model = {  # what a config.json holds
    "model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 64, "hidden_size": 256, "sliding_window": 128, "max_position_embeddings": 32768,
}  # fmt: skip
config = kv.load_engine_config(model, max_batch_size=4, max_kv_cache_capacity=2048)
targets = kv.targets_from_config(config, num_attention_heads=4)  # q, k, v and o of every layer
config = replace(config, max_lora_rank=8, max_loras=2, lora_targets=targets, kept_window_pages=200)


def adapter(seed: int) -> dict[str, np.ndarray]:
    """Return random matrices of rank 4; a path to a safetensors file or a PEFT folder does as well."""
    random = np.random.default_rng(seed)
    drawn = {}
    for target in targets:
        drawn[target.a_name] = random.normal(size=(target.k, 4)).astype(np.float16)
        drawn[target.b_name] = random.normal(size=(4, target.n)).astype(np.float16)
    return drawn


def prefill(batch: kv.Batch, sequence: kv.Sequence) -> int:
    """Append a prompt in chunks that end where windows can be kept; return how many tokens had to be computed."""
    computed = 0
    while sequence.pending_tokens:
        count = batch.prefill_chunk(sequence, 256)
        view = batch.step({sequence: count})
        computed += view.num_tokens  # the model's forward pass goes here
    return computed


with kv.SharedResources.create_for_llm(config) as res, kv.Batch(res, reuse=kv.ReuseOptions()) as batch:
    lora = res.lora_manager
    for name, seed in (("french", 1), ("german", 2)):
        lora.load(name, adapter(seed))
    system = [i % 251 for i in range(1000)]  # token ids
    questions = [[300 + i, 301, 302] for i in range(3)]

    print("prompt of 1,003 tokens: reused, computed")
    for who, question, name in (
        ("first", 0, None),
        ("second", 1, None),
        ("french", 0, "french"),
        ("french again", 1, "french"),
    ):
        sequence = batch.admit(system + questions[question], adapter=name)
        reused, computed = sequence.reused_tokens, prefill(batch, sequence)
        print(f"  {who:13} {reused:5} {computed:5}")
        # K and V depend on the adapter: what one left behind is not for sequences with another
        assert (reused > 0) == (who in ("second", "french again"))
        assert reused + computed == 1003
        batch.retire(sequence)

    # rows with different adapters in one step: adapter_ids are slots of the stacked matrices, 0 is none
    rows = [batch.admit(system + questions[2], adapter=name) for name in (None, "french", "german")]
    for sequence in rows:
        prefill(batch, sequence)
    batch.step(1)
    print("adapter_ids of a mixed batch:", lora.adapter_ids.to_host().tolist())
    batch.retire(rows[1])
    batch.compact()
    print("after a row left and another moved:", lora.adapter_ids.to_host().tolist())
    batch.audit()
    batch.clear()

    # an engine with one adapter at a time: its inputs never move, a switch copies the matrices there
    before = {name: tensor.address for name, tensor in lora.bindings.items()}
    for name in ("french", "german", None):
        lora.switch(name)
        first = lora.bindings[targets[0].a_name].to_host().astype(np.float32)
        assert np.any(first) == (name is not None)
        print(f"switched to {name}: {targets[0].a_name} begins with {first[0, 0]:.3f}, {first[0, 1]:.3f}")
    assert before == {name: tensor.address for name, tensor in lora.bindings.items()}
