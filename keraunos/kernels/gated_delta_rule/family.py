"""The family of the gated delta rule: a state with decays that each token corrects."""

from keraunos.kernels.gated_delta_rule.cases import CASES
from keraunos.kernels.gated_delta_rule.contract import GATED_DELTA_RULE as DELTA
from keraunos.kernels.state_pool.contract import OPERATORS
from keraunos.ops.family import CUDA, PORTABLE, Family, Operation

GATED_DELTA_RULE = Family(
    "gated_delta_rule",
    (
        Operation("gated_delta_rule", "gated_delta_rule", DELTA.operator,
                  "keraunos.modules.gated_delta_rule:GatedDeltaRule", distributed="linear",
                  cases=CASES["gated_delta_rule"]),
        # The walk over sequences whose states are in a pool.
        Operation("delta_prefill", "prefill", OPERATORS["delta_prefill"],
                  "keraunos.serving.pool_operation:DELTA_PREFILL", like="gated_delta_rule"),
    ),
    (*PORTABLE, *CUDA),
    transition="keraunos.kernels.gated_delta_rule.stretches:Transition",
)
