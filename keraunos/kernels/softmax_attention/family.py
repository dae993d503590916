"""The family of softmax attention."""

from keraunos.kernels.softmax_attention.cases import CASES
from keraunos.kernels.softmax_attention.contract import OPERATOR
from keraunos.ops.family import CUDA, NVIDIA, PORTABLE, TPU, Family, Operation, PlatformRow
from keraunos.ops.invocation import Backend, Platform

# Where the vendor's own kernels compute the call, nothing of ours is faster.
_VENDORS = tuple(
    PlatformRow(platform, platform, 40, "preferred_", frameworks=(framework,), backend=Backend.GPU, devices=NVIDIA)
    for platform, framework in ((Platform.XLA, "jax"), (Platform.TORCH, "torch"))
)
SOFTMAX_ATTENTION = Family(
    "softmax_attention",
    (
        Operation("attention", "attention", OPERATOR, "keraunos.modules.attention:Attention", distributed="softmax",
                  cases=CASES["attention"]),
    ),
    (*PORTABLE, *_VENDORS, *CUDA, *TPU),
)
