"""The family of linear attention: a state with a decay for each head, or for each token."""

from keraunos.kernels.linear_attention.cases import CASES
from keraunos.kernels.linear_attention.contract import GLA, LIGHTNING
from keraunos.kernels.state_pool.contract import OPERATORS
from keraunos.ops.family import CUDA, PORTABLE, TPU, Family, Operation

LINEAR_ATTENTION = Family(
    "linear_attention",
    (
        Operation("lightning_attn", "lightning_attention", LIGHTNING.operator,
                  "keraunos.modules.lightning_attention:LightningAttention", distributed="linear",
                  cases=CASES["lightning_attn"]),
        Operation("gla", "gla_attention", GLA.operator, "keraunos.modules.gla_attention:GLAttention",
                  distributed="linear", cases=CASES["gla"]),
        # The walk over sequences whose states are in a pool.
        Operation("prefill", "prefill", OPERATORS["prefill"], "keraunos.serving.pool_operation:PREFILL", like="gla"),
    ),
    (*PORTABLE, *CUDA, *TPU),
    transition="keraunos.kernels.linear_attention.stretches:Transition",
)
