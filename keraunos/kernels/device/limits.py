"""The limits of Triton's kernels, and their precision."""

from __future__ import annotations

from typing import Any

from keraunos import frontends
from keraunos.frontends import interpreter
from keraunos.ops.invocation import Invocation

# Bytes of shared memory that programs have on Hopper and sm_100 and nowhere else, of which tiles and stages were chosen
# by speed; and those that they have on A100 but not on sm_86, sm_89, sm_120 and AMD's GPUs (99 and 64 KB). With less,
# what is chosen is what lets two programs of four warps share a multiprocessor: by occupancy, as nothing was measured.
ENOUGH, LITTLE = frontends.SHARED_MEMORY, 160 * 1024


def precision(exact: bool) -> str:
    """How products are computed; exact: of float32."""
    # Six bf16 products are as good as float32; the interpreter, which computes in float32, has no name for them.
    return "tf32" if not exact else "ieee" if interpreter.ON else "bf16x6"


def finer() -> str:
    """How products of float32 are computed that need twice as many digits as 16-bit types have."""
    return "ieee" if interpreter.ON else "bf16x3"


def cannot_run(inv: Invocation, *dtypes: str, any_value: bool = False) -> str | None:
    """Why no kernel in Triton can run the call, or None.

    dtypes: those of its products; any_value: the kernels take as many dimensions of values as there are.
    """
    if inv.backend != "gpu" and not (interpreter.ON and inv.framework == "torch"):
        return f"needs a GPU; the call's arrays are on {inv.backend}"
    if reason := frontends.cannot_launch(inv.framework):
        return reason
    if "float64" in dtypes:
        return "Triton's matrix products have no float64; use xla or torch, or convert to float32"
    if any_value and inv.dims["K"] > 256:
        return f"takes head dims of keys up to 256; the call has K = {inv.dims['K']}"
    if not any_value and max(inv.dims["K"], inv.dims["V"]) > 256:
        return f"takes head dims up to 256; the call has K = {inv.dims['K']}, V = {inv.dims['V']}"
    return None


def four_warps(exact: bool, wide: bool, vector: bool, shared: int) -> dict[str, Any]:
    """The configuration of programs of four warps, on GPUs with so much shared memory.

    With less than Hopper has it is by occupancy, as nothing was measured there: two programs fit a multiprocessor, by
    registers and by shared memory. Products there take operands from registers: with 64 tokens to a chunk these do not
    hold them, but for gates per dimension (vector), whose pairs another kernel makes.
    """
    if shared >= ENOUGH:
        chunk, stages = 64, 2 if exact or wide else 3
    else:
        chunk = 64 if vector and not wide else 32
        stages = (1 if exact or wide else 2) if shared < LITTLE else (1 if exact else 2 if wide else 3)
    if exact:
        # With 32 and wide heads, ptxas runs out of registers, and 13.0 builds wrong code.
        chunk = 16 if wide else 32
    return dict(block_q=chunk, block_d=32 if exact and wide else 64, num_warps=4, num_stages=stages)
