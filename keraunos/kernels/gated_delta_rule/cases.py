"""Shapes of real models, shared by tests, benchmarks and the tuner: for each name, the sizes of one layer's call.

The keys are those of :meth:`GatedDeltaRule.invocation`. Lengths and batches are ours: prompts and training batches.
"""

from __future__ import annotations

from typing import Any

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "gated_delta_rule": {
        # 16 heads of queries and keys, 32 of values, all of 128: config.json of Qwen3-Next-80B-A3B.
        "qwen3-next prompt 8k": {"B": 1, "T": 8192, "H": 32, "HQ": 16, "G": 16, "HV": 32, "K": 128},
        "qwen3-next training": {"B": 4, "T": 8192, "H": 32, "HQ": 16, "G": 16, "HV": 32, "K": 128},
        # 32 heads of 128, gates per dimension: config.json of Kimi-Linear-48B-A3B.
        "kimi-linear prompt 8k": {"B": 1, "T": 8192, "H": 32, "K": 128, "gate": "vector"},
        "kimi-linear training": {"B": 4, "T": 4096, "H": 32, "K": 128, "gate": "vector"},
    },
}
