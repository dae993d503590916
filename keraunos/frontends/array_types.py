"""Names for the types of arrays and dtypes, where a function takes those of either framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

# An array of either framework, or of NumPy: then it is a constant of the call.
Array: TypeAlias = "jax.Array | torch.Tensor | np.ndarray"
# One kind of them, where what comes out is of the kind that went in.
ArrayT = TypeVar("ArrayT", "jax.Array", "torch.Tensor", "np.ndarray")
# A dtype of any of them, or its name.
DType: TypeAlias = "str | type | np.dtype | torch.dtype"
