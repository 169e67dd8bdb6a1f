# SPDX-License-Identifier: Apache-2.0
"""PyTorch at its best on one layer. Called by peers.py in a process of its own.

Weights are packed for oneDNN where that is faster than F.linear (MKL takes AVX2 kernels on AMD: 2.5 x). torch.compile
with freezing does so too; tried on BERT at 128 rows and on GPT-2 it was as fast or slower. Keys and values of
decode cases lie in buffers that are long enough, written in place; query heads that share keys are rows of one
product."""
import math
import time
import warnings

import torch
import torch.nn.functional as F

from peer_cases import Data

NAME = "PyTorch"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def version():
    return torch.__version__


def setup(threads):
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def unsupported(case):
    """Why there is no such layer; empty if there is."""
    return "" if case.types in DTYPES else "its int8 linear takes float32 rows and has no int8 keys"


def variants(case):
    """Names of the ways to compute the case; the fastest counts."""
    return ("sdpa", "matmul") if case.q_heads == case.kv_heads else ("sdpa", "matmul", "sdpa, enable_gqa")


def _seconds(call, repeats=4):
    call()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def _linear(weight, rows):
    """The faster of F.linear and oneDNN's packed one for so many rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # pylint: disable=protected-access
    ways = [lambda x: F.linear(x, weight),
            lambda x: torch.ops.mkldnn._linear_pointwise(  # pylint: disable=protected-access
                x, packed, None, "none", [], "")]
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
    return min(ways, key=lambda way: _seconds(lambda: way(x)))


class Layer:
    """`sets` copies of the layer; step(i) computes with copy i."""

    def __init__(self, case, data: Data, variant, sets):
        dtype = DTYPES[case.types]
        self.case, self.variant = case, variant
        rows = sum(case.lengths)
        self.x = torch.cat([torch.from_numpy(one) for one in data.rows]).to(dtype)
        self.weights = []
        for _ in range(sets):
            wqkv, wo = (torch.from_numpy(w).to(dtype, copy=True) for w in (data.wqkv, data.wo))
            self.weights.append((_linear(wqkv, rows), _linear(wo, rows)))
        self.caches = [self._cache(data, dtype) for _ in range(sets)] if case.decode else None
        self.masks = {n: torch.full((n, n), -math.inf, dtype=dtype).triu(1) for n in set(case.lengths)} \
            if case.causal and variant == "matmul" and not case.decode else {}
        self.y = None

    def _cache(self, data, dtype):
        case = self.case
        keys, values = (torch.zeros(len(case.lengths), case.kv_heads, case.cached + 64, case.head_dim, dtype=dtype)
                        for _ in range(2))
        for i in range(len(case.lengths)):
            for which, buffer in ((0, keys), (1, values)):
                buffer[i, :, :case.cached] = torch.from_numpy(data.cache(i, which)).to(dtype)
        return keys, values

    def _attend(self, q, k, v):
        """q: [batch, q heads, n, d], k and v with kv heads; whole sequences."""
        case, n = self.case, q.shape[2]
        gqa = case.q_heads != case.kv_heads
        if self.variant != "matmul":
            if gqa and self.variant == "sdpa":
                k, v = (one.repeat_interleave(case.q_heads // case.kv_heads, 1) for one in (k, v))
                gqa = False
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=gqa)
        if gqa:
            k, v = (one.repeat_interleave(case.q_heads // case.kv_heads, 1) for one in (k, v))
        scores = torch.matmul(q * case.head_dim**-0.5, k.transpose(-1, -2))
        if case.causal:
            scores += self.masks[n]
        return torch.matmul(scores.softmax(-1), v)

    def _decode(self, q, k, v, cache):
        """q: [batch, q heads, d]; appends k and v of [batch, kv heads, d]."""
        case, batch = self.case, q.shape[0]
        keys, values = cache
        keys[:, :, case.cached] = k
        values[:, :, case.cached] = v
        keys, values = keys[:, :, :case.cached + 1], values[:, :, :case.cached + 1]
        if self.variant == "sdpa, enable_gqa":
            return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
        q = q.reshape(batch, case.kv_heads, -1, case.head_dim)
        if self.variant == "sdpa":
            return F.scaled_dot_product_attention(q, keys, values)
        return torch.matmul(torch.matmul(q * case.head_dim**-0.5, keys.transpose(-1, -2)).softmax(-1), values)

    def step(self, which):
        case = self.case
        project, output = self.weights[which]
        parts = project(self.x).view(-1, case.q_heads + 2 * case.kv_heads, case.head_dim)
        heads = [case.q_heads, case.kv_heads, case.kv_heads]
        if case.decode:
            y = self._decode(*parts.split(heads, 1), self.caches[which])
        elif case.ragged:  # one by one between products of all rows
            y = torch.cat([self._attend(*one.transpose(0, 1)[None].split(heads, 1))[0].transpose(0, 1)
                           for one in parts.split(case.lengths)])
        else:
            parts = parts.view(len(case.lengths), case.lengths[0], -1, case.head_dim).transpose(1, 2)
            y = self._attend(*parts.split(heads, 1)).transpose(1, 2)
        self.y = output(y.reshape(-1, case.q_heads * case.head_dim))

    def outputs(self):
        return [one.float().numpy() for one in self.y.split(self.case.lengths)]

    def settle(self):
        """Nothing to put back between turns."""


def service(case, data: Data, parallel):
    """For peer_service.py: a function from rows [n, d_model] to outputs. parallel: it is called by many threads at
    once, each with one thread of computing; else by one at a time with all."""
    if parallel:
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes
    dtype, heads = DTYPES[case.types], [case.q_heads, case.kv_heads, case.kv_heads]
    project, output = (_linear(torch.from_numpy(w).to(dtype), 128) for w in (data.wqkv, data.wo))

    def compute(rows):
        with torch.inference_mode():
            x = torch.from_numpy(rows).to(dtype)
            q, k, v = project(x).view(1, len(rows), -1, case.head_dim).transpose(1, 2).split(heads, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
            return output(y.transpose(1, 2).reshape(len(rows), -1)).float().numpy()
    return compute
