"""Triton's interpreter, which runs kernels in NumPy: ``TRITON_INTERPRET=1`` where kernels are imported."""

import os

# As Triton reads it.
ON = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
# Whether it computes what a GPU would. Triton's own multiplies the bits of bfloat16 as integers, which our kernels use
# for float32 too. The tests mend it and set this.
is_right = False


def refuses() -> str | None:
    """Why no kernel of Triton can run, or None."""
    if not ON or is_right:
        return None
    return "TRITON_INTERPRET is set, and Triton's interpreter computes wrongly with bfloat16: unset it"
