"""One side in a process of its own: ``python -m benchmarks.worker kvcore|vllm``.

Reads a JSON line ``[workload, number of samples]`` for each burst, and answers the
samples as one. Prints ``null`` first; ends with its input.
"""

from __future__ import annotations

import gc
import json
import os
import sys

from benchmarks.workloads import WORKLOADS, Side, Workload


def make_side(name: str) -> Side:
    """The side of that name; each is importable only in its own environment."""
    if name == "vllm":
        from benchmarks.vllm_side import VllmSide

        return VllmSide()
    from benchmarks.kvcore_side import KvcoreSide

    return KvcoreSide()


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    side = make_side(sys.argv[1])
    made: dict[str, Workload] = {}
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        name, num_samples = json.loads(line)
        if name not in made:
            made.clear()
            made[name] = WORKLOADS[name](side, num_samples)
        gc.collect()
        gc.freeze()
        gc.disable()
        samples = made[name].burst()
        gc.enable()
        gc.unfreeze()
        print(json.dumps(samples), file=answers, flush=True)


if __name__ == "__main__":
    main()
