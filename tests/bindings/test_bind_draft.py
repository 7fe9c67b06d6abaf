"""bind: the draft of a speculative pair, with a cache of its own and with the base's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.errors import InputError
from tests.helpers.deployments import pair
from tests.helpers.models import tiny_config
from tests.helpers.ropes import rope

BASE = tiny_config(None, 8, 8, donors={2: 1}, max_batch_size=3, hidden_size=16, num_deepstack_features=1, ropes=(rope(),))
DRAFT = tiny_config(None, 6, heads=(2, 16), page_tokens=8, max_batch_size=3, max_kv_cache_capacity=67)


@contextmanager
def running(deployment: kv.DeploymentConfig) -> Iterator[list[tuple[kv.Batch, kv.StepView]]]:
    """Run a prefill of two prompts on every cache of a deployment."""
    with kv.SharedResources.create_for_spec_decode(deployment) as resources:
        found = []
        for index in range(len(resources.cache_managers)):
            batch = kv.Batch(resources, index=index)
            sequences = batch.update(admit=[4, 8])
            found.append((batch, batch.step({s: s.pending_tokens - index for s in sequences})))
        yield found


def test_each_model_is_bound_to_its_own() -> None:
    targets = (kv.LoRATarget(name="m", k=12, n=16),)
    with running(pair(base=replace(BASE, max_lora_rank=4, lora_targets=targets), draft=DRAFT)) as ((base, view), (_, drafted)):
        resources = base.resources
        mine, its = kv.bind(resources, view), kv.bind(resources, drafted, index=1)
        assert {name: (str(t.dtype), t.shape) for name, t in its.items()} == {
            "positions": ("int32", (10,)),
            "query_start_offsets": ("int32", (3,)),
            "query_lengths": ("int32", (2,)),
            "past_lengths": ("int32", (2,)),
            "attention_sequence_lengths": ("int32", (2,)),
            "kv_page_table": ("int32", (2, 2, 32)),
            "kv_slot_mapping": ("int64", (10,)),
            "swa_kv_page_table": ("int32", (2, 2, 32)),
            "swa_kv_slot_mapping": ("int64", (10,)),
            "zero_buffer": ("uint8", (384,)),
            "swa_kv_cache_mode": ("int8", (1,)),
            **dict.fromkeys(("past_key_values_0", "present_key_values_0"), ("bfloat16", (2, 3 * 9 + 2, 8, 2, 16))),
            **dict.fromkeys(("past_key_values_1", "present_key_values_1"), ("bfloat16", (2, 3 * 2 + 2, 8, 2, 16))),
        }
        assert mine["attention_sequence_lengths"].to_host().tolist() == [4, 8]
        assert its["attention_sequence_lengths"].to_host().tolist() == [3, 7]
        shared = {name for name in its if name in mine and its[name].address == mine[name].address}
        assert shared == {"zero_buffer", "swa_kv_cache_mode"}
        assert {"deepstack_embeds_0", "past_key_values_2"} <= set(mine)
        assert any("lora_A" in name for name in mine)
        for batch_view, index in ((view, 1), (drafted, 0)):
            with pytest.raises(InputError, match=f"is of another batch, not of model {index}"):
                kv.bind(resources, batch_view, index=index)
        with pytest.raises(InputError, match="index: 2 is not one of the 2 models"):
            kv.bind(resources, drafted, index=2)


def test_the_deep_stack_inputs_of_a_verification_step_fit_the_zero_buffer() -> None:
    """3 rows x 4 tokens x 16 channels of 2 bytes."""
    with running(pair(base=BASE, draft=DRAFT)) as ((base, _), _):
        view = base.step(4)
        assert base.resources.zero_buffer.nbytes == 384
        assert kv.bind(base.resources, view)["deepstack_embeds_0"].shape == (8, 16)


def test_a_draft_without_a_cache_is_bound_to_that_of_its_base() -> None:
    """Layers of the draft read the base's layers 2 (which borrows from 1) and 0, by the tables of their windows."""
    draft = replace(BASE, layers=(replace(BASE.layers[1]), BASE.layers[0]))
    with running(pair("gemma4_mtp", base=BASE, draft=draft, target_kv_layers=(2, 0))) as ((base, view),):
        resources = base.resources
        mine, its = kv.bind(resources, view), kv.bind(resources, view, index=1)
        assert set(its) == {
            "attention_sequence_lengths",
            "kv_page_table",
            "swa_kv_page_table",
            "zero_buffer",
            "swa_kv_cache_mode",
            *("past_key_values_0", "present_key_values_0", "past_key_values_1", "present_key_values_1"),
        }
        for name, target in (("past_key_values_0", 2), ("past_key_values_1", 0)):
            assert its[name].address == mine[f"past_key_values_{target}"].address
            assert its[name].shape == mine[f"past_key_values_{target}"].shape
        for name in ("kv_page_table", "swa_kv_page_table", "attention_sequence_lengths"):
            assert np.array_equal(its[name].to_host(), mine[name].to_host())
        step_rope = kv.StepRope(resources, index=1)
        extra = {"positions": resources.cache_managers[0].step_buffers.context_lens[: view.num_rows]}
        assert kv.bind(resources, view, index=1, extra=extra)["positions"].to_host().tolist() == [0, 0]
        assert step_rope.tables == resources.rope_tables


def test_a_draft_of_full_layers_has_no_window_tables() -> None:
    draft = replace(BASE, layers=BASE.layers[:1])
    with running(pair("gemma4_mtp", base=BASE, draft=draft)) as ((base, view),):
        assert not any(name.startswith("swa_kv_page") for name in kv.bind(base.resources, view, index=1))
