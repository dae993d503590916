"""Builds whose resources are recorded, in ``record.json``; as a script it makes those that are new, and writes it.

A build takes up to fifteen seconds of a processor: tests find the resources of most in the record, by their code or by
what the compiler makes of that at first. After a change of a kernel ``python -m tests.cuda.record`` is all there is to
do.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import triton

from tests.cuda import builds, delta_rule, test_decode, test_softmax_attention
from tests.cuda.compile import RECORD, RECORDED_WITH, identity, recorded, resources, source
from tests.cuda.softmax_attention import build_of

FORWARD, FEW = test_softmax_attention, test_decode
CALLS = {
    **{name: partial(builds.of, name) for name in (*builds.NAMES, *builds.DELTA_PREFILLS)},
    **{f"attention, {name}": partial(builds.of, name) for name in builds.ATTENTION},
    **{f"attention forward, {name}": lambda name=name: [build_of(FORWARD.CASES[name], FORWARD.forward_kernel)]
       for name in FORWARD.BUILT},
    **{f"few queries, {name}": lambda name=name: [build_of(FEW.CASES[name], FEW.decode_kernel)] for name in FEW.BUILT},
    **{name: partial(delta_rule.build, case) for name, case in delta_rule.BUILDS.items()},
    "delta rule, outputs": lambda: delta_rule.build(delta_rule.BUILDS["delta rule"], gradients=False),
    "few queries, joined": lambda: [build_of(FEW.CASES["everything"], FEW.join_kernel)],
}


def found(call: str, anew: bool = False) -> dict[str, dict]:
    """Resources of a call's kernels, by identities of their builds; ``anew``: also of those that are recorded."""
    rows, before = {}, {} if anew else recorded()
    for kernel, *build in CALLS[call]():
        known = identity(kernel, *build)
        found = before.get(known) or {"kernel": kernel.fn.__name__, **resources(kernel, *build)}
        rows[known] = {**found, "source": source(kernel, *build)}
    return rows


def record() -> None:
    """Build what is not recorded yet, on all processors, and write the record, a line for each build."""
    with ProcessPoolExecutor() as pool:
        rows = {key: row for some in pool.map(found, CALLS) for key, row in some.items()}
    in_order = sorted(rows.items(), key=lambda item: (item[1]["kernel"], item[0]))
    lines = [f" {json.dumps(key)}: {json.dumps(row)}" for key, row in in_order]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if triton.__version__ != RECORDED_WITH:
        sys.exit(f"recorded with Triton {RECORDED_WITH}; this is {triton.__version__}")
    record()
