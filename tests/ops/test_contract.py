"""Configurations: validated, stored as JSON, and every field of every implementation reaches its launch."""

import dataclasses
import functools
import inspect
import json
import shutil
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

import keraunos
from keraunos import frontends
from keraunos.kernels import kernel_registry
from keraunos.ops import Config

KERNELS = {
    "gla": keraunos.GLAttention, "lightning_attn": keraunos.LightningAttention, "attention": keraunos.Attention,
}
ROWS = [row for row in kernel_registry.rows() if row.algorithm in KERNELS]


READ = set()


class Watched(Config):
    """A configuration equal only to itself, which notes the fields that are asked for, also after pickling."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other

    def __getattribute__(self, name):
        if name in FIELDS:
            READ.add(name)
        return super().__getattribute__(name)


FIELDS = {f.name for f in dataclasses.fields(Config)} - {"platform", "backend"}


def watched(cfg):
    made = Watched(**{f.name: getattr(cfg, f.name) for f in dataclasses.fields(Config)})
    READ.clear()  # of what its own checks have read
    return made


def program(row, framework, cfg, gate, monkeypatch):
    """Forward and backward of a configuration as text: each Triton launch, and the framework's operations."""
    kernel = KERNELS[row.algorithm]()
    inv = dataclasses.replace(invocation(kernel, framework, gate, row.platform), backend="cpu")
    args, kwargs = kernel.sample(inv, 0)
    measure, launches = frontends.get(f"{framework}.measure"), []

    def launch(kernel, grid, inputs, outputs, constants, **options):
        launches.append(repr((str(kernel), grid, sorted(constants.items()), options)))
        # JAX traces once for equal configurations: the launch shows in the program, as the value of its results.
        fill = np.full if framework == "torch" else jax.numpy.full
        value = zlib.crc32(launches[-1].encode()) % 65521
        made = (measure.array(fill(o[0], value), o[1], "cpu") if isinstance(o, tuple) else o for o in outputs.values())
        return tuple(inputs[o] if isinstance(o, str) else o for o in made)

    monkeypatch.setattr(frontends, "launch", launch)
    run = functools.partial(kernel.run, cfg=cfg, **kwargs)
    cotangents = [measure.normal(shape, dtype, 7, "cpu") for shape, dtype in measure.results(run, args)]
    launches.clear()
    if framework == "torch":
        import torch

        with torch.profiler.profile(record_shapes=True) as profile:
            measure.program(run, args, cotangents)
        return repr(launches) + repr([(event.name, event.input_shapes) for event in profile.events()])
    given = {i: x for i, x in enumerate(args) if isinstance(x, jax.Array)}

    def both(given, cotangents):
        def outputs(given):
            return jax.tree.leaves(run(*(given.get(i, x) for i, x in enumerate(args))))

        return jax.vjp(outputs, given)[1](list(cotangents))

    return str(jax.make_jaxpr(both)(given, cotangents))


def invocation(kernel, framework, gate, platform):
    # Long enough for several chunks of every candidate.
    dtype = "bfloat16" if platform in ("pallas", "cuda") else "float32"
    if gate == "window":
        return kernel.invocation(framework, dtype, T=300, H=2, K=64, window=200)
    return kernel.invocation(framework, dtype, T=300, H=2, K=128, gate=gate)


CALLS = [
    pytest.param(row, framework, id=f"{row.algorithm}-{row.platform}-{framework}")
    for row in ROWS
    for framework in row.frameworks
]


@pytest.mark.parametrize(("row", "framework"), CALLS)
def test_every_field_reaches_the_launch_and_no_other_is_read(row, framework, monkeypatch):
    try:
        implementation = row.implementation
    except ImportError as error:
        pytest.skip(f"{row.platform} cannot be imported: {error}")
    pytest.importorskip(framework)
    kernel = KERNELS[row.algorithm]()
    vector = "scalar" if row.platform == "cuda" else "vector"
    gates = {"gla": (vector, "constant"), "attention": ("window",)}.get(row.algorithm, ("constant",))
    inv = invocation(kernel, framework, gates[0], row.platform)
    heuristic = kernel.heuristic_cfg(inv, row)

    read = set()
    for gate in gates:
        program(row, framework, watched(heuristic), gate, monkeypatch)
        read |= READ
    assert read == set(implementation.fields)
    assert all(getattr(heuristic, name) is not None for name in implementation.fields), "the heuristic leaves one open"

    def texts(cfg):
        return [program(row, framework, cfg, gate, monkeypatch) for gate in gates]

    usual = texts(heuristic)
    assert usual == texts(heuristic), "what is recorded varies by itself"
    for name in implementation.fields:
        values = {getattr(cfg, name) for cfg in kernel.candidate_cfgs(inv, row)} - {getattr(heuristic, name)}
        assert values, f"{name} has one value only: it is no tunable"
        other = min(values)
        assert usual != texts(dataclasses.replace(heuristic, **{name: other})), f"{name} = {other} changes nothing"


def test_the_contract_notices_a_field_that_goes_nowhere(monkeypatch):
    row = next(row for row in ROWS if (row.algorithm, row.platform) == ("gla", "xla"))
    prepare, fixed = row.implementation.prepare, keraunos.Config(block_q=64)

    def ignore(args, *, cfg, **options):
        assert cfg.block_q
        return prepare(args, cfg=fixed, **options)

    deaf = dataclasses.replace(row.implementation, prepare=ignore)
    monkeypatch.setitem(row.__dict__, "implementation", deaf)
    monkeypatch.setattr(kernel_registry, "generation", -1)
    with pytest.raises(AssertionError, match=r"block_q = .* changes nothing"):
        test_every_field_reaches_the_launch_and_no_other_is_read(row, "jax", monkeypatch)


@pytest.mark.parametrize("cls", [Config, keraunos.GLAttentionConfig, keraunos.LightningAttentionConfig])
def test_configurations_survive_json(cls):
    for cfg in (cls(), cls(block_q=64, num_warps=8, platform="triton", backend="gpu")):
        assert cls.from_json(json.loads(json.dumps(cfg.to_json()))) == cfg
    with pytest.raises(ValueError, match=r"unknown fields \['blocks'\]"):
        cls.from_json({"blocks": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().block_q = 1


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("block_q", 48, "a power of two from 1 to 1024"),
        ("block_q", 2048, "a power of two from 1 to 1024"),
        ("block_k", 0, "a power of two from 1 to 1024"),
        ("block_k", 16.0, "a power of two from 1 to 1024"),
        ("block_d", 8, "a power of two from 16 to 256"),
        ("num_warps", 3, "1, 2, 4, 8 or 16"),
        ("num_warps", True, "1, 2, 4, 8 or 16"),
        ("num_stages", 9, "from 1 to 8"),
        ("platform", "", "a platform's name"),
        ("backend", "gpus", "expected one of cpu, gpu, tpu, any"),
    ],
)
def test_a_bad_field_is_refused_with_the_reason(field, value, wanted):
    with pytest.raises(ValueError, match=rf"Config: {field} is .*{wanted}"):
        Config(**{field: value})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.algorithm}-{row.platform}")
def test_candidates_are_complete_and_distinct(row):
    try:
        implementation = row.implementation
    except ImportError as error:
        pytest.skip(f"{row.platform} cannot be imported: {error}")
    kernel = KERNELS[row.algorithm]()
    inv = kernel.invocation(row.frameworks[0], T=300, H=2, K=128)
    candidates = kernel.candidate_cfgs(inv, row)
    assert len(candidates) == len(set(candidates))
    assert candidates[0] == kernel.heuristic_cfg(inv, row)
    for cfg in candidates:
        given = set(cfg.to_json()) - {"platform", "backend"}
        assert given == set(implementation.fields)
        assert (cfg.platform, cfg.backend) == (row.platform, row.backend)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.algorithm}-{row.platform}")
def test_a_change_of_any_file_with_its_kernels_makes_stored_configurations_stale(row, tmp_path):
    try:
        implementation = row.implementation
    except ImportError as error:
        pytest.skip(f"{row.platform} cannot be imported: {error}")
    source = Path(implementation.source)
    module = next(m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(source))
    used = [Path(m.__file__) for m in vars(module).values() if inspect.ismodule(m) and getattr(m, "__file__", None)]
    files = [source, *(file for file in used if file.parent == source.parent)]

    def version():
        return dataclasses.replace(implementation, source=str(folder / source.name)).source_version

    folder = tmp_path / "copy"
    shutil.copytree(source.parent, folder)
    versions = {version()}
    for file in files:
        with (folder / file.name).open("a") as copy:
            copy.write("# changed")
        versions.add(version())
    assert len(versions) == 1 + len(files)


@pytest.mark.parametrize("platform", ["xla", "torch"])
def test_a_change_of_chunks_that_families_share_makes_stored_configurations_stale(platform, tmp_path):
    pytest.importorskip({"xla": "jax", "torch": "torch"}[platform])
    implementation = kernel_registry.get("gla", platform)
    source = Path(implementation.source)
    shutil.copytree(source.parents[1], tmp_path / "kernels")
    moved = dataclasses.replace(implementation, source=str(tmp_path / "kernels" / source.parent.name / source.name))
    before = moved.source_version
    with (tmp_path / "kernels" / "recurrent" / source.name).open("a") as copy:
        copy.write("# changed")
    assert dataclasses.replace(moved).source_version != before
