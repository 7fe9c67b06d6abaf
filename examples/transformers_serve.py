"""Serve prompts with a transformers model that attends over numba_kv's pages: sequences join and leave from step to step.

pip install -e ".[interop]"
python examples/transformers_serve.py [MODEL]      (a folder or a name on the Hub; default: a tiny random model)
"""

import sys

try:
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig
except ImportError:
    print('skipped: torch and transformers are not installed (pip install -e ".[interop]")')
    raise SystemExit from None

from numba_kv.adapters.transformers_packed import PackedCache

CHUNK, NEW_TOKENS = 32, 20

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    torch.manual_seed(0)
    config = Gemma3TextConfig(hidden_size=64, num_hidden_layers=6, intermediate_size=128, vocab_size=256, sliding_window=32)
    model = AutoModelForCausalLM.from_config(config).eval()

waiting = [list(range(3, 3 + tokens)) for tokens in (100, 7, 55, 40, 12)]  # prompts
with torch.no_grad(), PackedCache.for_model(model, max_batch=3, max_tokens=256) as cache:
    active, ends = {}, {}  # sequence -> its ids, and how many they become
    while waiting or active:
        while waiting and len(active) < 3:
            ids = waiting.pop(0)
            sequence = cache.batch.admit(ids)
            active[sequence], ends[sequence] = ids, len(ids) + NEW_TOKENS
        tokens = {sequence: ids[sequence.length :][:CHUNK] for sequence, ids in active.items()}
        view = cache.batch.step({sequence: len(ids) for sequence, ids in tokens.items()})
        logits = model(**cache.model_inputs(view, tokens)).logits
        for sequence, ids in list(active.items()):
            if sequence.length == len(ids):  # all of it is stored: the last token's logits choose the next
                ids.append(int(logits[0, sequence.row].argmax()))
            if len(ids) == ends[sequence]:
                own = model.generate(torch.tensor([ids[:-NEW_TOKENS]]), max_new_tokens=NEW_TOKENS, do_sample=False)
                print(ids[-NEW_TOKENS:], "as by generate" if own[0].tolist() == ids else "not as by generate")
                cache.batch.retire(sequence)
                del active[sequence]
    print(cache, cache.batch.audit())
