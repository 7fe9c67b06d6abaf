"""Recurrent layers whose inputs are known: what each token brings, and the states that follow from them, from scratch."""

from __future__ import annotations

from typing import Any

import numpy as np

import numba_kv as kv
from numba_kv.cache.mamba_cache import MambaCacheManager
from numba_kv.config import Mamba2Layer
from tests.helpers.states import everything, kinds_of, replayed_delta_net, replayed_mamba, sequential_delta_net

#: What one token brings to a layer: by stash, and `conv`.
Inputs = dict[str, np.ndarray]


class StateModel:
    """Stands for the forward pass of the recurrent layers of a model, and checks resident states.

    A step changes resident states; a verification step leaves them alone and writes what a commit reads.
    """

    def __init__(self, states: MambaCacheManager) -> None:
        self.states = states
        self.layer: Any = states.layer
        self.random = np.random.default_rng(11)
        self.told: dict[object, list[list[Inputs]]] = {}  # of each sequence: tokens, and layers of each
        self.is_mamba = isinstance(self.layer, Mamba2Layer)

    def inputs(self) -> Inputs:
        """Return what a token brings to a layer."""
        random, layer = self.random, self.layer
        heads, dim, size = layer.state_shape
        made: Inputs = {"conv": random.normal(size=layer.conv_shape(0)[0])}
        if self.is_mamba:
            made |= {"da": random.uniform(0.5, 1, heads), "u": random.normal(size=(heads, dim))}
            made |= {"b": random.normal(size=(layer.num_groups, size)), "dt": random.uniform(0, 1, heads)}
        elif layer.has_recurrent_state:
            key = random.normal(size=(layer.num_key_heads, dim))
            made |= {"k": key / np.linalg.norm(key, axis=-1, keepdims=True), "g": random.uniform(0.5, 1, heads)}
            made |= {"beta": random.uniform(0, 1, heads), "v": random.normal(size=(heads, size))}
        return {name: value.astype(np.float32) for name, value in made.items()}

    def after(self, state: np.ndarray, given: Inputs) -> np.ndarray:
        """Return a state behind a token, as a kernel makes it."""
        if not self.layer.has_recurrent_state:
            return state
        if self.is_mamba:
            return replayed_mamba(state, given["da"], given["u"], given["b"], given["dt"])
        return sequential_delta_net(state, given["k"], given["g"], given["beta"], given["v"])

    def resident(self, arrays: dict[str, np.ndarray], layer: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the state and the convolution state in a slot; a convolution alone has a state without elements."""
        state = arrays["recurrent_state"][layer, slot] if self.layer.has_recurrent_state else np.zeros(self.layer.state_shape)
        return state, arrays["conv_state"][layer, slot]

    def step(self, view: kv.StepView, counts: dict[kv.Sequence, int]) -> None:
        """Append tokens: resident states change."""
        slots = view.state_index.to_host()
        pools = {name: everything(self.states, name) for name in kinds_of(self.states)}
        for sequence, count in counts.items():
            slot = int(slots[sequence.row])
            for _ in range(count):
                token = [self.inputs() for _ in range(self.states.num_layers)]
                self.told.setdefault(sequence, []).append(token)
                for number, given in enumerate(token):
                    state, conv = self.resident(pools, number, slot)
                    state[...] = self.after(state, given)
                    conv[...] = shifted(conv, given["conv"])
        for name, values in pools.items():
            self._fill(name, values)

    def verify(self, view: kv.StepView, counts: dict[kv.Sequence, int], parents: tuple[int, ...] | None) -> None:
        """Verify tokens or nodes: snapshots or inputs are written, behind each sequence's own state."""
        slots = view.state_index.to_host()
        arrays = {name: everything(self.states, name) for name in self.states.state_names}
        for sequence, count in counts.items():
            row, slot = sequence.row, int(slots[sequence.row])
            tokens = [[self.inputs() for _ in range(self.states.num_layers)] for _ in range(count)]
            self.told.setdefault(sequence, []).extend(tokens)
            for number in range(self.states.num_layers):
                behind: list[tuple[np.ndarray, np.ndarray]] = []
                resident = self.resident(arrays, number, slot)
                for node, token in enumerate(tokens):
                    parent = node - 1 if parents is None else parents[node]
                    state, conv = behind[parent] if parent >= 0 else resident
                    given = token[number]
                    behind.append((self.after(state, given), shifted(conv, given["conv"])))
                    for name, value in {**given, "recurrent": behind[-1][0], "conv_after": behind[-1][1]}.items():
                        place = {"recurrent": "intermediate_recurrent_state", "conv_after": "intermediate_conv_state"}
                        array = arrays.get(place.get(name, f"replay_{name}_state"))
                        if array is not None:
                            array[number, row, node] = value
                if "intermediate_conv_state" not in arrays:  # drafts have room in the state itself
                    for token in tokens:
                        conv = arrays["conv_state"][number, slot]
                        conv[...] = shifted(conv, token[number]["conv"])
        for name, values in arrays.items():
            self._fill(name, values)

    def check(self, slots: list[int], waiting: set[kv.Sequence]) -> None:
        """Compare states with those that follow from the tokens alone, in float64; `waiting` are not committed yet."""
        found = {name: everything(self.states, name) for name in kinds_of(self.states)}
        for sequence, tokens in self.told.items():
            if sequence in waiting:
                continue
            slot = slots[sequence.row]
            for number in range(self.states.num_layers):
                state = np.zeros(self.layer.state_shape)
                conv = np.zeros(found["conv_state"].shape[2:])
                for token in tokens:
                    given = {name: value.astype(np.float64) for name, value in token[number].items()}
                    if self.is_mamba:
                        drive = np.repeat(given["b"], len(state) // len(given["b"]), axis=0) * given["dt"][:, None]
                        state = state * given["da"][:, None, None] + drive[:, None, :] * given["u"][:, :, None]
                    elif self.layer.has_recurrent_state:
                        state = replayed_delta_net(state, given["k"], given["g"], given["beta"], given["v"])
                    conv = shifted(conv, given["conv"])
                if self.layer.has_recurrent_state:
                    assert np.allclose(found["recurrent_state"][number, slot], state, 1e-3, 1e-4), (sequence, number)
                kept = self.layer.conv_shape(0)[1]  # columns before them are room for drafts
                assert np.array_equal(found["conv_state"][number, slot][:, -kept:], conv[:, -kept:].astype(np.float32))

    def _fill(self, name: str, values: np.ndarray) -> None:
        for layer in range(self.states.num_layers):
            array = self.states.state(name, layer)
            array.fill_from(np.ascontiguousarray(values[layer].astype(array.dtype.numpy())))


def shifted(conv: np.ndarray, newest: np.ndarray) -> np.ndarray:
    """Return a convolution state [C, columns] behind one more input [C]."""
    return np.concatenate([conv[:, 1:], newest[:, None].astype(conv.dtype)], 1)
