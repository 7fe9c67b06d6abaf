"""Generate with a transformers model whose K and V are in numba_kv's pages.

pip install -e ".[interop]"
python examples/transformers_generate.py [MODEL]      (a folder or a name on the Hub; default: a tiny random model)
"""

import sys

try:
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig
except ImportError:
    print('skipped: torch and transformers are not installed (pip install -e ".[interop]")')
    raise SystemExit from None

from numba_kv.adapters.transformers import PagedCache

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
else:
    torch.manual_seed(0)
    config = Gemma3TextConfig(hidden_size=64, num_hidden_layers=6, intermediate_size=128, vocab_size=256, sliding_window=32)
    model = AutoModelForCausalLM.from_config(config).eval()

prompt = torch.arange(3, 103)[None]
choices = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 50, "do_sample": False}
with PagedCache.for_model(model, max_tokens=256, page_tokens=16) as cache:
    tokens = model.generate(prompt, cache=cache, **choices)
    print(tokens[0, prompt.shape[1] :].tolist())
    print(cache, cache.batch.audit())
assert torch.equal(tokens, model.generate(prompt, **choices)), "the tokens of transformers' own cache are others"
print("the same tokens as with transformers' own cache")
