"""PyTorch's operators of keraunos: importing this module registers them all, ``torch.ops.keraunos.gla`` and the others.

A program that ``torch.export`` has saved names them, and needs them registered before it is loaded::

    import keraunos.torch_ops
    program = torch.export.load("model.pt2")

Calls register what they need by themselves, so nothing else needs the import.

The operators: ``gla``, ``lightning_attn``, ``gated_delta_rule`` and ``attention``, each with its gradient
(``gla_backward``, ...), and those that change a pool of states: ``decode``, ``verify``, ``commit``, ``prefill`` and
``delta_prefill``, that of the delta rule. Their names and arguments last: tensors, numbers and texts, such as
``platform="triton"`` and ``launch="block_q=64 num_warps=4"``, what was chosen when the graph was made. Arguments are
checked as those of the public functions are, so that a program may come from anyone.
"""

from __future__ import annotations

from keraunos import frontends
from keraunos.kernels import FAMILIES

for _family in FAMILIES:
    for _operation in _family.operations:
        frontends.get("torch").operators.register(_operation.operator)
