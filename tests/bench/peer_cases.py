# SPDX-License-Identifier: Apache-2.0
"""The layers that peers.py compares, by the names attend-bench gives them: shapes, random data and float64
reference. Read by peers.py and by the three libraries' files; knows no library but numpy."""
from __future__ import annotations

import dataclasses
import math

import numpy as np

MIB = 1 << 20
COLD_BYTES = 600 * MIB  # a decode case cycles over layers of so many bytes in all, as attend-bench does
TYPES = ("f32", "bf16", "i8")
_BYTES = {"f32": 4, "bf16": 2, "i8": 1}

# Relative L2 distance from float64 that each type may have. f32: far above what summing in float32 leaves (2e-7 to
# 1e-6) and far below one rounding to bf16 (2e-3). bf16: rows, q, k, v, weights and outputs rounded at 2^-9 each.
# i8: 2^-8 of a row's largest value in rows and weights, which lies about 4 deviations out.
TOLERANCE = {"f32": 1e-5, "bf16": 2.0**-6, "i8": 2.0**-4}

# name: d_model, q heads, kv heads, head width, causal. RoPE of the last two is left out of the peers' layers, which
# favours them.
MODELS = {
    "transformer-base": (512, 8, 8, 64, False),
    "bert-base": (768, 12, 12, 64, False),
    "gpt2-medium": (1024, 16, 16, 64, True),
    "llama-7b": (4096, 32, 32, 128, True),
    "gqa-32-8": (4096, 32, 8, 128, True),
}

SHAPES = (
    "layer/transformer-base/512", "layer/bert-base/128", "layer/bert-base/8x128", "layer/gpt2-medium/1024",
    "layer/llama-7b/512", "layer/gqa-32-8/512",
    "mixed/bert-base/2048", "mixed/gqa-32-8/2048",
    "decode/gqa-32-8/1x4096", "decode/gqa-32-8/8x4096", "decode/gqa-32-8/32x4096", "decode/gpt2-medium/8x1024",
)
QUICK_SHAPES = ("layer/bert-base/128", "layer/bert-base/8x128", "layer/gpt2-medium/1024", "layer/gqa-32-8/512",
                "decode/gqa-32-8/8x4096")


class UnknownCase(ValueError):
    """A name that no case has; str() says which there are."""


def mixed_lengths(rows=2048):
    """16 .. 512 rows each and `rows` in all: the numbers of std::mt19937(4), as attend-bench draws them."""
    raw = np.random.RandomState(4)._bit_generator  # pylint: disable=protected-access
    lengths = []
    while (left := rows - sum(lengths)) > 0:
        lengths.append(min(16 + int(raw.random_raw()) % 497, left))
    return lengths


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer: new rows of each sequence, and the keys cached before them (decode)."""
    name: str
    d_model: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    lengths: tuple[int, ...]
    cached: int
    types: str

    @property
    def decode(self):
        return self.cached > 0

    @property
    def ragged(self):
        return len(set(self.lengths)) > 1

    @property
    def qkv_width(self):
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    def stored_bytes(self):
        """Weights, keys and values that a step has to read; of whole sequences only the weights are kept."""
        values = self.d_model * (self.qkv_width + self.q_heads * self.head_dim)
        keys = len(self.lengths) * self.cached * 2 * self.kv_heads * self.head_dim
        return (values + keys) * _BYTES[self.types]

    def sets(self):
        """Layers, each with its weights and caches, that take turns."""
        return math.ceil(COLD_BYTES / self.stored_bytes()) if self.decode else 1


def find_case(name):
    """The case of a name GROUP/MODEL/SHAPE/TYPES; UnknownCase."""
    shape, _, types = name.rpartition("/")
    if shape not in SHAPES or types not in TYPES:
        raise UnknownCase(f"no case {name!r}; there are {', '.join(SHAPES)}, each with /{', /'.join(TYPES)}")
    group, model, extent = shape.split("/")
    d_model, q_heads, kv_heads, head_dim, causal = MODELS[model]
    count, _, rows = extent.rpartition("x")
    sequences, rows = int(count or 1), int(rows)
    lengths = {"layer": [rows] * sequences, "decode": [1] * sequences}.get(group) or mixed_lengths(rows)
    cached = rows if group == "decode" else 0
    return Case(name, d_model, q_heads, kv_heads, head_dim, causal, tuple(lengths), cached, types)


def select(patterns, quick=False, types=("f32", "bf16")):
    """Names of the cases that start with one of `patterns` or contain it after a slash; all without patterns."""
    shapes = QUICK_SHAPES if quick else SHAPES
    names = [f"{shape}/{kind}" for shape in shapes for kind in TYPES]
    if not patterns:
        return [name for name in names if name.rpartition("/")[2] in types]
    names = [f"{shape}/{kind}" for shape in SHAPES for kind in TYPES]
    chosen = []
    for pattern in patterns:
        found = [name for name in names if name == pattern or f"/{pattern}/" in f"/{name}/"]
        if not found:
            find_case(pattern)
        chosen += [name for name in found if name not in chosen]
    return chosen


def to_bf16(values):
    """float32 values rounded to nearest even at bf16's eight bits; no NaN among them."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


class Data:
    """Weights, rows and caches of a case, float32; those of bf16 and i8 cases are bf16 values."""

    def __init__(self, case):
        self.case = case
        # Values repeat every 4 Mi: timing needs memory, not entropy.
        self._noise = np.random.default_rng(5).standard_normal(4 * MIB, dtype=np.float32)
        if case.types != "f32":
            self._noise = to_bf16(self._noise)
        heads = case.q_heads * case.head_dim
        self.wqkv = self._take((case.qkv_width, case.d_model), 0) / np.float32(64 if case.d_model > 1024 else 32)
        self.wo = self._take((case.d_model, heads), 1) / np.float32(64 if case.d_model > 1024 else 32)
        self.rows = [self._take((length, case.d_model), 2 + i) for i, length in enumerate(case.lengths)]

    def _take(self, shape, where):
        count, start = math.prod(shape), where * 1000003 % self._noise.size
        return np.resize(np.roll(self._noise, -start) if start else self._noise, count).reshape(shape).copy()

    def cache(self, sequence, which):
        """Keys (which 0) or values (1) of a sequence: [kv_heads, cached, head_dim]."""
        case = self.case
        return self._take((case.kv_heads, case.cached, case.head_dim), 77 + 2 * sequence + which)

    def reference(self, sequence, picked):
        """float64 output of the rows `picked` of a sequence, from the stored values."""
        case, x = self.case, self.rows[sequence].astype(np.float64)
        q_width, kv_width = case.q_heads * case.head_dim, case.kv_heads * case.head_dim
        w = self.wqkv.astype(np.float64)
        q = (x[picked] @ w[:q_width].T).reshape(-1, case.q_heads, case.head_dim)
        k, v = ((x @ part.T).reshape(-1, case.kv_heads, case.head_dim).transpose(1, 0, 2)
                for part in (w[q_width:q_width + kv_width], w[q_width + kv_width:]))
        if case.decode:
            k = np.concatenate([self.cache(sequence, 0), k], 1)
            v = np.concatenate([self.cache(sequence, 1), v], 1)
        visible = np.ones((len(picked), k.shape[1]), bool)
        if case.causal:
            visible = np.arange(k.shape[1])[None, :] <= np.asarray(picked)[:, None] + case.cached
        outputs = np.empty((len(picked), q_width))
        for head in range(case.q_heads):
            group = head * case.kv_heads // case.q_heads
            scores = np.where(visible, q[:, head] @ k[group].T / math.sqrt(case.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            outputs[:, head * case.head_dim:(head + 1) * case.head_dim] = \
                weights @ v[group] / weights.sum(1, keepdims=True)
        return outputs @ self.wo.astype(np.float64).T


def relative_error(data, outputs):
    """Relative L2 distance of a peer's outputs (one array per sequence) from float64, over some rows of the first
    and the last sequence; infinite when one is not finite."""
    above = below = 0.0
    for sequence in sorted({0, len(outputs) - 1}):
        length = data.case.lengths[sequence]
        if outputs[sequence].shape != (length, data.case.d_model):
            return math.inf
        picked = sorted({0, length // 3, length // 2, length - 1})
        wanted = data.reference(sequence, picked)
        above += float(np.square(outputs[sequence][picked].astype(np.float64) - wanted).sum())
        below += float(np.square(wanted).sum())
    return math.sqrt(above / below) if math.isfinite(above) else math.inf
