# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime at its best on one layer. Called by peers.py in a process of its own.

The layer is a graph of two MatMul around one of the fused attention operators; inputs and outputs are bound, so
that nothing is copied, and the caches of decode cases are shared between past and present."""
import os
import tempfile

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from peer_cases import Data

NAME = "ONNX Runtime"
_threads = 1


def version():
    return ort.__version__


def setup(threads):
    global _threads
    _threads = threads
    ort.set_default_logger_severity(4)  # optimising a model with external data warns of paths


def unsupported(case):
    if case.types == "bf16":
        return "no bf16 MatMul on x86"
    return ""


def variants(case):
    if case.decode:
        return ("GroupQueryAttention",)
    ways = []
    if case.q_heads == case.kv_heads:
        ways += ["MultiHeadAttention", "Attention"]
    if case.causal:
        ways += ["GroupQueryAttention"]
    if case.ragged:
        return tuple(f"{way}, {how}" for way in ways for how in ("one by one", "padded")
                     if how == "one by one" or way != "Attention")
    return tuple(ways)


def _graph(case, data, way, padded):
    """The layer as an ONNX model: x [batch, n, d_model] -> y."""
    nodes, inputs = [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "n", case.d_model])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "n", case.d_model])]
    wqkv = np.ascontiguousarray(data.wqkv.T)
    constants = {"wqkv": wqkv, "wo": np.ascontiguousarray(data.wo.T)}
    if way == "Attention":  # projects itself
        constants["bias"] = np.zeros(case.qkv_width, np.float32)
        names = ["x", "wqkv", "bias"]
    else:
        nodes.append(helper.make_node("MatMul", ["x", "wqkv"], ["qkv"]))
    if way == "MultiHeadAttention":
        constants["sizes"] = np.array([case.q_heads * case.head_dim] + [case.kv_heads * case.head_dim] * 2, np.int64)
        nodes.append(helper.make_node("Split", ["qkv", "sizes"], ["q", "k", "v"], axis=-1))
        names = ["q", "k", "v"]
        if padded:
            names += ["", "keys"]
            inputs.append(helper.make_tensor_value_info("keys", TensorProto.INT32, ["batch"]))
    made, attributes = ["heads"], {"num_heads": case.q_heads}
    if way == "GroupQueryAttention":
        names = ["qkv", "", "", *(("past_k", "past_v") if case.decode else ("", "")), "last", "total"]
        attributes["kv_num_heads"] = case.kv_heads
        made += ["present_k", "present_v"]
        inputs += [helper.make_tensor_value_info("last", TensorProto.INT32, ["batch"]),
                   helper.make_tensor_value_info("total", TensorProto.INT32, [])]
        shape = ["batch", case.kv_heads, "room", case.head_dim]
        if case.decode:
            inputs += [helper.make_tensor_value_info(f"past_{one}", TensorProto.FLOAT, shape) for one in "kv"]
        outputs += [helper.make_tensor_value_info(f"present_{one}", TensorProto.FLOAT, shape) for one in "kv"]
    elif case.causal:
        attributes["unidirectional"] = 1
    nodes.append(helper.make_node(way, names, made, domain="com.microsoft", **attributes))
    nodes.append(helper.make_node("MatMul", ["heads", "wo"], ["y"]))
    graph = helper.make_graph(nodes, "layer", inputs, outputs,
                              [numpy_helper.from_array(value, name) for name, value in constants.items()])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21),
                                                                  helper.make_opsetid("com.microsoft", 1)])


def _session(model, i8):
    options = ort.SessionOptions()
    options.intra_op_num_threads = _threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    if not i8:
        return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    with tempfile.TemporaryDirectory() as folder:
        plain, quantised = os.path.join(folder, "plain.onnx"), os.path.join(folder, "quantised.onnx")
        onnx.save(model, plain)
        quantize_dynamic(plain, quantised, weight_type=QuantType.QInt8, per_channel=True)
        return ort.InferenceSession(quantised, options, ["CPUExecutionProvider"])


def _value(array):
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), "cpu")


class Layer:
    """`sets` copies of the layer; step(i) computes with copy i."""

    def __init__(self, case, data: Data, variant, sets):
        self.case = case
        way, _, how = variant.partition(", ")
        self.padded = how == "padded"
        model = _graph(case, data, way, self.padded)
        self.sessions = [_session(model, case.types == "i8") for _ in range(sets)]
        batches = [[i] for i in range(len(case.lengths))] if case.ragged and not self.padded else \
            [list(range(len(case.lengths)))]
        self.bound = [[self._bind(session, data, way, batch) for batch in batches] for session in self.sessions]

    def _bind(self, session, data, way, batch):
        case = self.case
        longest = max(case.lengths[i] for i in batch)
        x = np.zeros((len(batch), longest, case.d_model), np.float32)
        for row, i in zip(x, batch):
            row[:case.lengths[i]] = data.rows[i]
        y = _value(np.zeros_like(x))
        binding = session.io_binding()
        # OrtValues must live as long as their binding.
        kept = {"x": _value(x), "y": y}
        if way == "MultiHeadAttention" and self.padded:
            kept["keys"] = _value(np.array([case.lengths[i] for i in batch], np.int32))
        if way == "GroupQueryAttention":
            last = [case.cached + case.lengths[i] - 1 for i in batch]
            kept["last"] = _value(np.array(last, np.int32))
            kept["total"] = _value(np.array(max(last) + 1, np.int32))
            room = case.cached + 64 if case.decode else longest
            for which, one in enumerate("kv"):
                cache = np.zeros((len(batch), case.kv_heads, room, case.head_dim), np.float32)
                for i in batch if case.decode else ():
                    cache[i, :, :case.cached] = data.cache(i, which)
                kept[f"present_{one}"] = _value(cache)
                if case.decode:
                    kept[f"past_{one}"] = kept[f"present_{one}"]
        for name, value in kept.items():
            if name.startswith("present") or name == "y":
                binding.bind_ortvalue_output(name, value)
            else:
                binding.bind_ortvalue_input(name, value)
        return batch, binding, kept

    def step(self, which):
        session = self.sessions[which]
        for _, binding, _ in self.bound[which]:
            session.run_with_iobinding(binding)

    def outputs(self):
        """Of copy 0's last step."""
        outputs = [None] * len(self.case.lengths)
        for batch, _, kept in self.bound[0]:
            for row, i in zip(kept["y"].numpy(), batch):
                outputs[i] = row[:self.case.lengths[i]]
        return outputs

    def settle(self):
        """Nothing to put back between turns."""


def service(case, data: Data, parallel):
    """For peer_service.py: a function from rows [n, d_model] to outputs. parallel: it is called by many threads at
    once, each with one thread of computing; else by one at a time with all."""
    global _threads
    if parallel:
        _threads = 1
    session = _session(_graph(case, data, "MultiHeadAttention", False), case.types == "i8")
    return lambda rows: session.run(["y"], {"x": rows[None]})[0]
