# SPDX-License-Identifier: Apache-2.0
"""The self-attention cases of tests/golden (their README has the format), asked of a server through the Python
client. Cross-attention and attention weights are left to the tests in C++.
"""
import json

import numpy as np
from sentence_encoder import read_safetensors

from support.servers import GOLDEN


def cases(variant, kind):
    """(case, rows, wanted output) of the cases of one kind: "full" or "incremental"."""
    tensors = read_safetensors(GOLDEN / variant / "cases.safetensors")
    found = [(case, *(tensors[f"{case['id']}.{name}"] for name in ("hidden_states", "output")))
             for case in json.loads((GOLDEN / variant / "cases.json").read_text())["cases"]
             if case["kind"] == kind and case["role"] == "self"]
    assert found, f"{variant} has no {kind} cases"
    return found


def difference(output, wanted, case):
    """In tolerances of the case; infinite where something is not a number."""
    largest = np.abs(output - wanted).max()
    return largest / case["tolerance"]["float32_abs"] if np.isfinite(largest) else np.inf


def largest_difference(client, variant):
    """Of all full cases, in tolerances of each."""
    differences = []
    for case, rows, wanted in cases(variant, "full"):
        output = client.attend(case["layer"], rows, lengths=case["lengths"], model=variant).output
        differences += [difference(output[i, :length], wanted[i, :length], case)
                        for i, length in enumerate(case["lengths"])]
    return max(differences)


def largest_difference_in_sessions(client, variant):
    """Of all incremental cases, call by call, in tolerances of each."""
    differences = []
    for case, rows, wanted in cases(variant, "incremental"):
        with client.open_session(model=variant) as session:
            position = 0
            for chunk in case["chunks"]:
                end = position + chunk
                output = session.attend(case["layer"], rows[0, position:end]).output
                differences.append(difference(output, wanted[0, position:end], case))
                position = end
    return max(differences)
