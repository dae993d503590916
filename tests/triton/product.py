"""A kernel for tests of launching: the sum of the products of n matrices, each with the one after it."""

import triton
import triton.language as tl


@triton.jit
def product_kernel(x, n, y, BLOCK: tl.constexpr):
    o_x = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    b_y = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for i in range(n):
        p_x = x + i * BLOCK * BLOCK
        b_y = tl.dot(tl.load(p_x + o_x), tl.trans(tl.load(p_x + BLOCK * BLOCK + o_x)), b_y)
    tl.store(y + o_x, b_y)
