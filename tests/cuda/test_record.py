"""The recorded builds are those that are built."""

import pytest

pytest.importorskip("torch")

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tests.cuda import record
from tests.cuda.addresses import unset_in
from tests.cuda.compile import RECORDED_WITH, recorded, resources
from tests.linear_attention.cases import GPU

pytestmark = [
    pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu"),
    pytest.mark.skipif(triton.__version__ != RECORDED_WITH, reason=f"recorded with Triton {RECORDED_WITH}"),
]


# What is built whenever tests run: a call of each operation. Of all others it is only seen that the compiler would
# begin with the same.
@pytest.mark.parametrize("call", ["constant", "prefill", "attention, causal", "few queries, one query",
                                  "delta rule, outputs"])
def test_what_is_built_is_as_recorded(call):
    found = record.found(call, anew=True)
    assert found
    # Their code may be another, of which the compiler makes the same.
    assert {key: recorded()[key] | {"source": row["source"]} for key, row in found.items()} == found


@gluon.jit
def square_kernel(x, y, KEEP: gl.constexpr):
    """The products of rows, and their sums: the exchange between threads for these may take the rows' memory."""
    W: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    EACH: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, EACH))[:, None] * 64
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, EACH))[None, :]
    rows = gl.load(x + i + j)
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    rows_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    rows_s.store(rows)
    fence_async_shared()
    gl.thread_barrier()
    a = warpgroup_mma(rows_s, rows_s.permute((1, 0)), gl.zeros([64, 64], gl.float32, W), use_acc=False, is_async=True)
    sums = gl.convert_layout(gl.sum(rows.to(gl.float32), 0), gl.SliceLayout(0, W))
    if KEEP:
        a, _ = warpgroup_mma_wait(0, deps=[a, rows_s])
    else:
        a = warpgroup_mma_wait(0, deps=[a])
    gl.store(y + i + j, gl.convert_layout(a + sums[None, :], EACH))


def test_memory_that_a_product_reads_is_kept():
    types = {"x": "*bf16", "y": "*fp32"}
    assert resources(square_kernel, types, {"KEEP": True})
    with pytest.raises(AssertionError, match=r"square_kernel: products read what may be overwritten: .*%rows_s"):
        resources(square_kernel, types, {"KEEP": False})


# As nvdisasm writes it: a product after two branches, of which one alone sets the address of its right operand.
BRANCHES = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   UIADD3.64 UR6, UR4, 0x2, URZ ;
.L_x_1:
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/                   EXIT ;
"""


def test_addresses_that_one_branch_alone_sets_are_found():
    assert unset_in(BRANCHES) == ["UR6", "UR7"]
    assert unset_in(BRANCHES.replace("@!P0 BRA `(.L_x_1)", "NOP")) == []
    # One whose left operand is in registers reads no address of that.
    assert unset_in(BRANCHES.replace("R24, gdesc", "R24, R20, gdesc").replace("UR6, UR4", "UR4, UR6")) == ["UR6", "UR7"]
