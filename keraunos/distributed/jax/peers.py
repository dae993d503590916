"""JAX: devices of one host that write states straight into each other's memory, where they can.

Inside ``shard_map`` a mesh has names and sizes, no devices: whether they can is known only when the program is lowered.
So both ways are traced, and one of them is lowered.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir

from keraunos.distributed import peers
from keraunos.ops.registry import HOPPER

_log = logging.getLogger("keraunos")

_exchange = Primitive("keraunos_exchange")
_exchange.multiple_results = True


def exchange(directly: Callable, otherwise: Callable, *args: Any) -> jax.Array:
    """One of two functions, each of which makes one array: the first where devices reach each other's memory."""
    flat, tree = jax.tree.flatten(args)

    def traced(way: Callable) -> ClosedJaxpr:
        return jax.make_jaxpr(lambda *flat: way(*jax.tree.unflatten(tree, flat)))(*flat)

    return _exchange.bind(*flat, directly=traced(directly), otherwise=traced(otherwise))[0]


@_exchange.def_abstract_eval
def _result(*args: Any, directly: ClosedJaxpr, otherwise: ClosedJaxpr) -> list:
    return otherwise.out_avals


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, directly: ClosedJaxpr, otherwise: ClosedJaxpr,
           able: bool = False) -> Any:
    chosen = directly if able else otherwise
    return mlir.core_call_lowering(ctx, *args, name="keraunos_exchange", call_jaxpr=chosen)


def _lower_on_gpu(ctx: mlir.LoweringRuleContext, *args: Any, directly: ClosedJaxpr, otherwise: ClosedJaxpr) -> Any:
    reason = unreachable(ctx.module_context.axis_context)
    _log.info("states of the devices of a mesh go %s", f"through NCCL: {reason}" if reason else "directly")
    return _lower(ctx, *args, directly=directly, otherwise=otherwise, able=not reason)


mlir.register_lowering(_exchange, _lower)
mlir.register_lowering(_exchange, _lower_on_gpu, platform="cuda")


def unreachable(context: Any) -> str:
    """Why devices cannot write into each other's memory; empty if they can.

    Args:
        context: of the program that is lowered, which axes of which mesh it is mapped over.
    """
    mesh = getattr(context, "mesh", None)
    if peers.refused():
        return peers.REFUSED
    if not isinstance(mesh, jax.sharding.Mesh) or {*mesh.axis_names} != {*context.manual_axes}:
        return "not all axes of the mesh are those of a shard_map"
    if jax.device_count() != jax.local_device_count():
        return "several processes have the devices"
    devices = [*mesh.devices.flat]
    # XLA and the kernel count devices alike only then.
    if [device.id for device in devices] != [*range(len(devices))]:
        return "the mesh has the devices in another order than jax.devices()"
    name, pattern = HOPPER
    if not all(re.search(pattern, device.device_kind) for device in devices):
        return f"a device is not {name}"
    # The kernel has run on two GPUs. On more, only in the interpreter.
    if len(devices) > 2 and not peers.demanded():
        return "there are more than two devices, and KERAUNOS_PEERS is not 1"
    gpus = {device.local_hardware_id for device in devices}
    return next(filter(None, (peers.without_atomics(gpu, gpus) for gpu in gpus)), "")
