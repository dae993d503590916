"""Shapes of real models, shared by tests, benchmarks and the tuner: for each name, the sizes of one layer's call.

The keys are those of :meth:`keraunos.Attention.invocation`. Lengths and batches are ours: prompts and training batches.
"""

from __future__ import annotations

from typing import Any

_CAUSAL: dict[str, Any] = {"causal": True}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {
        # Every eighth layer of MiniMax-Text-01, by its model card: 64 heads of 128 on 8 key/value heads.
        "minimax-01 prompt 8k": {"B": 1, "T": 8192, "H": 64, "G": 8, "K": 128, **_CAUSAL},
        "minimax-01 prompt 32k": {"B": 1, "T": 32768, "H": 64, "G": 8, "K": 128, **_CAUSAL},
        # config.json of Ring-mini-linear-2.0.
        "ring-mini-linear training": {"B": 8, "T": 4096, "H": 16, "G": 4, "K": 128, **_CAUSAL},
        # config.json of gpt-oss-20b: a sink for each head; every other layer has a window of 128.
        "gpt-oss training": {"B": 4, "T": 4096, "H": 64, "G": 8, "K": 64, "sinks": 1, **_CAUSAL},
        "gpt-oss window, training": {"B": 4, "T": 4096, "H": 64, "G": 8, "K": 64, "sinks": 1, "window": 127, **_CAUSAL},
        # config.json of gemma-2-9b: logits capped at 50.
        "gemma-2 training": {"B": 2, "T": 8192, "H": 16, "G": 8, "K": 256, "soft_cap": True, **_CAUSAL},
        # Documents packed into rows, with all that a model may add.
        "packed training": {"B": 1, "T": 8192, "H": 64, "K": 128, "soft_cap": True, "sinks": 1, "segments": True,
                            **_CAUSAL},
    },
}
