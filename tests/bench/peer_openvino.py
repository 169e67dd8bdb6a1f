# SPDX-License-Identifier: Apache-2.0
"""OpenVINO at its best on one layer. Called by peers.py in a process of its own.

The layer is two MatMul around ScaledDotProductAttention. Decode cases keep keys and values in the model's state,
the form that its CPU plugin fuses with the attention; the state grows by a token with each call and is put back
between turns. Rows are float32 in and out at every type."""
import threading

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

from peer_cases import Data

NAME = "OpenVINO"
_core = None
_threads = 1


def version():
    return ov.__version__.partition("-")[0]


def setup(threads):
    global _core, _threads
    _core, _threads = ov.Core(), threads


def unsupported(_case):
    return ""


def variants(case):
    if case.types == "i8":
        return ("rows quantised, one by one", "one by one") if case.ragged else ("rows quantised", "int8 weights only")
    return ("one by one", "padded") if case.ragged else ("sdpa",)


def _weight(values, i8):
    if not i8:
        return ops.constant(values)
    scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
    stored = ops.constant(np.rint(values / scale).astype(np.int8))
    return ops.multiply(ops.convert(stored, "f32"), ops.constant(scale))


def _heads(node, count, width):
    """[batch, n, heads x width] -> [batch, heads, n, width]"""
    split = ops.reshape(node, np.array([0, 0, count, width], np.int64), True)
    return ops.transpose(split, np.array([0, 2, 1, 3], np.int64))


def _repeated(node, case):
    """Each kv head once for every query head that shares it. A product with ones is what the plugin fuses with the
    state and does not copy (seen: with Broadcast it copies, 732 ms instead of 20)."""
    group = case.q_heads // case.kv_heads
    if group == 1:
        return node
    apart = ops.reshape(node, np.array([0, case.kv_heads, 1, -1, case.head_dim], np.int64), True)
    shared = ops.multiply(apart, ops.constant(np.ones((1, 1, group, 1, 1), np.float32)))
    return ops.reshape(shared, np.array([0, case.q_heads, -1, case.head_dim], np.int64), True)


def _model(case, data, padded):
    i8 = case.types == "i8"
    x = ops.parameter([-1, -1, case.d_model], np.float32, name="x")
    inputs, sinks = [x], []
    qkv = ops.matmul(x, _weight(data.wqkv, i8), False, True)
    widths = np.array([case.q_heads * case.head_dim] + [case.kv_heads * case.head_dim] * 2, np.int64)
    parts = ops.variadic_split(qkv, np.int64(-1), widths)
    q, k, v = (_heads(parts.output(i), count, case.head_dim)
               for i, count in enumerate((case.q_heads, case.kv_heads, case.kv_heads)))
    if case.decode:
        beam = ops.parameter([-1], np.int32, name="beam_idx")
        inputs.append(beam)
        grown = []
        for name, new in (("k", k), ("v", v)):
            info = VariableInfo()
            info.data_shape = ov.PartialShape([-1, case.kv_heads, -1, case.head_dim])
            info.data_type, info.variable_id = ov.Type.f32, name
            variable = Variable(info)
            empty = ops.broadcast(np.float32(0), ops.concat([ops.shape_of(beam), np.array(
                [case.kv_heads, 0, case.head_dim], np.int64)], 0))
            past = ops.gather(ops.read_value(empty, variable), beam, np.int64(0))
            grown.append(ops.concat([past, new], 2))
            sinks.append(ops.assign(grown[-1], variable))
        k, v = grown
    mask = []
    if padded:
        mask = [ops.parameter([-1, 1, -1, -1], np.float32, name="mask")]
        inputs += mask
    y = ops.scaled_dot_product_attention(q, _repeated(k, case), _repeated(v, case), *mask,
                                         causal=case.causal and not case.decode and not padded)
    y = ops.reshape(ops.transpose(y, np.array([0, 2, 1, 3], np.int64)),
                    np.array([0, 0, case.q_heads * case.head_dim], np.int64), True)
    y = ops.matmul(y, _weight(data.wo, i8), False, True)
    return ov.Model([ops.result(y)], sinks, inputs, "layer")


def _settings(case, quantise_rows=False):
    precision = {"f32": "f32", "bf16": "bf16", "i8": "bf16"}[case.types]
    return {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": _threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": {"f32": "f32", "bf16": "bf16", "i8": "u8"}[case.types],
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 2**32 if quantise_rows else 0}


class Layer:
    """`sets` copies of the layer; step(i) computes with copy i."""

    def __init__(self, case, data: Data, variant, sets):
        self.case, self.data = case, data
        padded = variant == "padded"
        self.batches = [[i] for i in range(len(case.lengths))] if variant.endswith("one by one") else \
            [list(range(len(case.lengths)))]
        model = _model(case, data, padded)
        self.requests, self.kept = [], [self._inputs(batch, padded) for batch in self.batches]
        for _ in range(sets):
            request = _core.compile_model(model, "CPU", _settings(case, variant.startswith("rows quantised")))\
                .create_infer_request()
            self.requests.append(request)
        self.grown = 0
        self.ys = [None] * len(self.batches)
        self._fill()

    def _inputs(self, batch, padded):
        case = self.case
        longest = max(case.lengths[i] for i in batch)
        x = np.zeros((len(batch), longest, case.d_model), np.float32)
        for row, i in zip(x, batch):
            row[:case.lengths[i]] = self.data.rows[i]
        inputs = {"x": x}
        if case.decode:
            inputs["beam_idx"] = np.arange(len(batch), dtype=np.int32)
        if padded:
            lengths = np.array([case.lengths[i] for i in batch])
            hidden = np.arange(longest)[None, None, :] >= lengths[:, None, None]
            if case.causal:
                hidden = hidden | (np.arange(longest)[None, None, :] > np.arange(longest)[None, :, None])
            hidden = np.broadcast_to(hidden, (len(batch), longest if case.causal else 1, longest))
            inputs["mask"] = np.where(hidden, np.float32(-3e38), np.float32(0))[:, None]
        return inputs

    def _fill(self):
        """Puts the cached keys and values back."""
        case = self.case
        if not case.decode:
            return
        caches = [np.stack([self.data.cache(i, which) for i in range(len(case.lengths))]) for which in (0, 1)]
        for request in self.requests:
            for state in request.query_state():
                state.state = ov.Tensor(caches["kv".index(state.name)])
        self.grown = 0

    def step(self, which):
        request = self.requests[which]
        for i, inputs in enumerate(self.kept):
            self.ys[i] = request.infer(inputs, share_inputs=True, share_outputs=len(self.kept) == 1)
        self.grown += 1

    def outputs(self):
        outputs = [None] * len(self.case.lengths)
        for batch, y in zip(self.batches, self.ys):
            for row, i in zip(y[0], batch):
                outputs[i] = np.array(row[:self.case.lengths[i]])
        return outputs

    def settle(self):
        """Puts the state back when it has grown by more than a percent."""
        if self.case.decode and self.grown > len(self.requests) * self.case.cached / 100:
            self._fill()


def service(case, data: Data, parallel):
    """For peer_service.py: a function from rows [n, d_model] to outputs. parallel: it is called by many threads at
    once, each with one thread of computing; else by one at a time with all."""
    settings = _settings(case)
    if parallel:
        settings.update(PERFORMANCE_HINT="THROUGHPUT", NUM_STREAMS=_threads)
    compiled = _core.compile_model(_model(case, data, False), "CPU", settings)
    mine = threading.local()

    def compute(rows):
        if not hasattr(mine, "request"):
            mine.request = compiled.create_infer_request()
        return mine.request.infer({"x": rows[None]}, share_inputs=True)[0]
    return compute
