# SPDX-License-Identifier: Apache-2.0
"""A library of the peers in a process of its own, so that no pool of threads disturbs another's. Started by
peers.py; answers one JSON line per command on the standard input: prepare a case, run it for some time."""
import gc
import importlib
import itertools
import json
import os
import statistics
import sys
import time

import peer_cases


def time_steps(layer, copies, seconds, least=3):
    """Milliseconds of each step. copies: an iterator over the copies of the layer, so that they take turns across
    calls, too."""
    times, end = [], time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        begun = time.perf_counter()
        layer.step(next(copies))
        times.append(1e3 * (time.perf_counter() - begun))
    return times


class Worker:
    """One library and the case it was last given."""

    def __init__(self, library):
        self.library = library
        self.layer = None
        self.case = None
        self.copies = None

    def prepare(self, name):
        """Builds every variant of the case, checks each, keeps the fastest."""
        self.layer = None
        gc.collect()
        self.case = case = peer_cases.find_case(name)
        reason = self.library.unsupported(case)
        if reason:
            return {"unsupported": reason}
        data, best, tried, failures = peer_cases.Data(case), None, {}, []
        variants = self.library.variants(case)
        for variant in variants:
            layer = None
            gc.collect()
            try:
                layer = self.library.Layer(case, data, variant, case.sets())
                layer.step(0)
                error = peer_cases.relative_error(data, layer.outputs())
                copies = itertools.cycle(range(case.sets()))
                time_steps(layer, copies, 0, least=case.sets())
                tried[variant] = statistics.median(time_steps(layer, copies, 0.3))
            except Exception as failure:  # pylint: disable=broad-except
                failures.append(f"{variant}: {type(failure).__name__}: {str(failure)[:300]}")
                continue
            if best is None or tried[variant] < tried[best]:
                best, self.layer, self.copies, best_error = variant, layer, copies, error
        if best is None:
            return {"unsupported": "failed: " + "; ".join(failures)}
        return {"variant": best if len(variants) > 1 else "", "error": best_error, "tried_ms": tried,
                "failures": failures}

    def run(self, seconds):
        """Times of steps in about `seconds` seconds, after one round that is not counted."""
        self.layer.settle()
        time_steps(self.layer, self.copies, seconds / 5, least=self.case.sets())
        return {"times_ms": time_steps(self.layer, self.copies, seconds)}


def main():
    library, threads = sys.argv[1], int(sys.argv[2])
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(f"peer_{library}")
    module.setup(threads)
    worker = Worker(module)
    print(json.dumps({"name": module.NAME, "version": module.version()}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = worker.prepare(command["prepare"]) if "prepare" in command else worker.run(command["run"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
