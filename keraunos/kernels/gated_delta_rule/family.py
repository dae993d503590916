"""The family of the gated delta rule: a state with decays that each token corrects."""

from keraunos.kernels.gated_delta_rule.cases import CASES
from keraunos.ops.family import Family, Operation, PlatformRow
from keraunos.ops.invocation import Platform

GATED_DELTA_RULE = Family(
    "gated_delta_rule",
    (
        Operation("gated_delta_rule", "gated_delta_rule", "keraunos.modules.gated_delta_rule:GatedDeltaRule",
                  cases=CASES["gated_delta_rule"]),
    ),
    (
        PlatformRow(Platform.XLA, "xla", 10, frameworks=("jax",)),
        PlatformRow(Platform.TORCH, "torch", 10, frameworks=("torch",)),
    ),
)
