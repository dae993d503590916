"""Shapes of real models, shared by tests, benchmarks and the tuner: for each name, the sizes of one layer's call.

The keys are those of :meth:`LinearOperation.invocation`. Models differ in heads and head sizes; lengths and batches are
ours: a short and a long prompt, and a training batch.
"""

from __future__ import annotations

from typing import Any

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "lightning_attn": {
        # 64 heads of 128: the model card of MiniMax-Text-01; MiniMax-M1 is made from that model (arXiv:2506.13585).
        "minimax-01 prompt 2k": {"B": 1, "T": 2048, "H": 64, "K": 128},
        "minimax-01 prompt 8k": {"B": 1, "T": 8192, "H": 64, "K": 128},
        "minimax-01 training": {"B": 2, "T": 16384, "H": 64, "K": 128},
        # 16 heads of 128: config.json of Ring-mini-linear-2.0, whose 4 key/value heads are those of softmax layers.
        "ring-mini-linear prompt 8k": {"B": 1, "T": 8192, "H": 16, "K": 128},
        "ring-mini-linear training": {"B": 8, "T": 4096, "H": 16, "K": 128},
        # 32 heads in a width of 4096: Ring-flash-linear-2.0, table 1 of arXiv:2510.19338.
        "ring-flash-linear prompt 8k": {"B": 1, "T": 8192, "H": 32, "K": 128},
        "ring-flash-linear training": {"B": 8, "T": 4096, "H": 32, "K": 128},
        # The blocks of the model that `make run` trains.
        "demo training": {"B": 2, "T": 256, "H": 4, "K": 32, "dtype": "float32"},
    },
    "gla": {
        # 4 heads, keys half and values all of a width of 2048: config.json of fla-hub/gla-1.3B-100B.
        "gla-1.3b prompt 2k": {"B": 1, "T": 2048, "H": 4, "K": 256, "V": 512},
        "gla-1.3b training": {"B": 8, "T": 2048, "H": 4, "K": 256, "V": 512},
        # No model's, but the sizes of lightning attention's models with other gates.
        "vector gate, 64 heads, 8k": {"B": 1, "T": 8192, "H": 64, "K": 128},
        "vector gate, 32 heads, training": {"B": 8, "T": 4096, "H": 32, "K": 128},
        # 8 heads, keys once and values twice a width of 2048: config.json of fla-hub/retnet-1.3B-100B; and with a gate
        # per token in place of the constant one.
        "retnet-1.3b training": {"B": 4, "T": 4096, "H": 8, "K": 256, "V": 512, "gate": "constant"},
        "scalar gate, 8 heads, training": {"B": 4, "T": 4096, "H": 8, "K": 256, "V": 512, "gate": "scalar"},
        "demo training": {"B": 2, "T": 256, "H": 4, "K": 32, "dtype": "float32"},
    },
}
