"""Prefill on the platform ``cuda``, on a Hopper GPU, from both frameworks: what no emulator shows."""

import dataclasses
import re

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import keraunos
from keraunos import serving
from keraunos.ops.family import HOPPER
from tests.cuda.platform import delta_prefill, small_prefill
from tests.cuda.test_prefill import CASES, transposed
from tests.linear_attention.cases import GPU
from tests.serving.cases import arguments, array, results, run_torch, runner, tensor

pytestmark = pytest.mark.skipif(not GPU, reason="needs a GPU: run with --gpu")

LONG = {
    "long": small_prefill(lengths=(1500, 1, 64, 700), fresh=(3,), tail=300),
    "long, gates": small_prefill(lengths=(1500, 1, 64, 700), fresh=(3,), gate="scalar", decay=3.0),
    "of each request": small_prefill(each=True),
    "no tokens": small_prefill(lengths=(0, 0, 0, 0), fresh=(0, 2)),
    "delta, long": delta_prefill(K=128, V=128, lengths=(1500, 1, 64, 700), fresh=(3,), tail=300, norm=True),
    "delta, cut": delta_prefill(K=128, V=128, lengths=(2500, 1, 0, 1800), fresh=(3,), tail=70, norm=True),
    "delta, cut, one": delta_prefill(K=128, V=128, lengths=(2000,), slots=(3,), pool="bfloat16"),
    "delta, no tokens": delta_prefill(lengths=(0, 0, 0, 0), fresh=(0, 2)),
}


@pytest.fixture(autouse=True)
def _hopper():
    if not re.search(HOPPER[1], torch.cuda.get_device_name()):
        pytest.skip(f"needs {HOPPER[0]}")


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_values(name, framework):
    pytest.importorskip(framework)
    (CASES | LONG)[name].check(runner("cuda", framework))


@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", ["none", "scalar"])
def test_pools_with_strides(pool, gate):
    case = small_prefill(pool=pool, gate=gate, fresh=(1,), tail=3)
    case.check(lambda case: run_torch("cuda", case, transposed))


def whole(case):
    return {name: tensor(x) for name, x in case.arrays.items()}


def call(case, given, **options):
    """``(output, pool)``, bit for bit."""
    args, gates = arguments("prefill", given)
    made = serving.prefill(*args, **gates, **case.options, **options, platform="cuda")
    return tuple(map(array, results("prefill", given, made)))


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("skip", [0, 1], ids=["copied", "stored"])
def test_outputs_go_where_they_are_wanted(skip):
    """An output may begin where copies of blocks cannot: at no multiple of 16 bytes."""
    case = small_prefill(slots=(3, -1, 6, 0), gate="scalar", fresh=(0,), tail=70)
    size = case.rows[0] * case.H * case.V
    room = torch.full((size + 8,), torch.nan, dtype=torch.bfloat16, device="cuda")
    out = room[skip : skip + size].view(*case.rows, case.H, case.V)
    want = call(case, whole(case))
    for _ in range(2):
        room.fill_(torch.nan)
        assert same(call(case, whole(case), out=out), want)
        assert same((array(out),), want[:1])
        assert room[:skip].isnan().all()
        assert room[skip + size :].isnan().all()


@pytest.mark.parametrize("case", [
    *(small_prefill(lengths=(3, 70, 2, 1), fresh=(2,), tail=3, size=9, gate=gate) for gate in ("none", "scalar")),
    delta_prefill(lengths=(3, 70, 2, 1), fresh=(2,), tail=3, size=9),
], ids=["none", "scalar", "delta"])
def test_a_captured_call_serves_other_requests(case):
    """Replayed with other slots, lengths and padding, a graph gives what a new call gives."""
    other = dataclasses.replace(case, slots=(8, -1, 7, 4), lengths=(64, 0, 5, 3), tail=7, fresh=(0, 3), seed=1)
    given, second = whole(case), whole(other)
    args, gates = arguments("prefill", given)
    serving.prefill(*args, **gates, platform="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = serving.prefill(*args, **gates, platform="cuda")
    for name, x in given.items():
        if x is not None:
            x.copy_(second[name])
    graph.replay()
    assert same(map(array, made), call(other, second))


@pytest.mark.parametrize("case", [
    small_prefill(lengths=(70, 5, 130, 200), slots=(3, 1, 6, 0), gate="scalar", fresh=(1,)),
    delta_prefill(lengths=(70, 5, 130, 200), slots=(3, 1, 6, 0), fresh=(1,)),
], ids=["scalar", "delta"])
def test_requests_do_not_depend_on_their_batch(case):
    output, pool = call(case, whole(case))
    ends = np.cumsum([0, *case.lengths])
    for n, slot in enumerate(case.slots):
        given, where = whole(case), slice(*ends[n : n + 2])
        given |= {name: x[where] for name in ("query", "key", "value", "g", "beta") if (x := given[name]) is not None}
        given |= {name: given[name][n : n + 1] for name in ("slots", "has_initial")}
        given["cu_seqlens"] = torch.tensor([0, case.lengths[n]], device="cuda")
        alone, states = call(case, given)
        assert alone.tobytes() == output[where].tobytes()
        assert states[slot].tobytes() == pool[slot].tobytes()


@pytest.mark.parametrize("case", [
    small_prefill(lengths=(300, 0, 65, 130), slots=(3, 1, -1, 0), gate="scalar", fresh=(1,), tail=200),
    delta_prefill(lengths=(300, 0, 65, 130), slots=(3, 1, -1, 0), fresh=(1,), tail=200),
], ids=["scalar", "delta"])
def test_the_same_bits_each_time(case):
    """A call's results do not depend on what its memory held."""
    want = call(case, whole(case))
    for _ in range(50):
        poison = [torch.full((2**22,), torch.nan, device="cuda") for _ in range(8)]
        del poison
        assert same(call(case, whole(case)), want)


def test_a_pool_of_more_values_than_32_bits_count():
    case = small_prefill(H=64, lengths=(70, 5), slots=(2, 0), size=3, fresh=(1,))
    given = whole(case)
    want = call(case, whole(case))
    last = 2**31 // (64 * 128 * 128) + 1
    pool = torch.zeros(last + 1, 64, 128, 128, device="cuda")
    pool[last] = given["states"][2]
    given |= {"states": pool, "slots": torch.tensor([last, 0], device="cuda")}
    args, gates = arguments("prefill", given)
    output, _ = serving.prefill(*args, **gates, platform="cuda")
    assert same((array(output), array(pool[last]), array(pool[0])), (want[0], want[1][2], want[1][0]))
    assert not pool[1:last].any()


def test_nothing_is_compiled_for_lengths_or_requests():
    from keraunos.kernels.linear_attention.cuda.outputs import outputs_kernel

    def compiled(*lengths):
        case = small_prefill(lengths=lengths, slots=tuple(range(len(lengths))), size=len(lengths) + 1)
        call(case, whole(case))
        return len(outputs_kernel.device_caches[torch.cuda.current_device()][0])

    first = compiled(64)
    for lengths in ((1,), (3, 0, 16), (100, 1, 7, 5), (128,) * 16, (1000,)):
        assert compiled(*lengths) == first


def test_compiled_by_torch():
    case = small_prefill(lengths=(3, 70, 2, 1), fresh=(2,), tail=3)
    want = call(case, whole(case))
    gates = arguments("prefill", whole(case))[1]
    compiled = torch.compile(lambda *args: serving.prefill(*args, **gates, platform="cuda"), fullgraph=True,
                             backend="aot_eager")
    for _ in range(2):
        given = whole(case)
        made = compiled(*arguments("prefill", given)[0])
        assert same(map(array, results("prefill", given, made)), want)
        assert same(want[1:], [array(given["states"])])


def test_auto_takes_it():
    def chosen(H, lengths, **fields):
        given = whole(small_prefill(H=H, lengths=lengths, slots=tuple(range(len(lengths))), size=40, **fields))
        args, gates = arguments("prefill", given)
        return keraunos.explain(serving.prefill, *args, **gates).platform

    assert chosen(16, (300,) * 32) == chosen(16, (300,) * 32, gate="scalar") == "cuda"
    assert chosen(16, (300,) * 32, gate="scalar", gamma=False, delta=True) == "cuda"
    assert chosen(16, (300,)) == chosen(16, (300,) * 32, gate="vector") == "triton"


def test_jax_puts_the_pool_in_its_place():
    """A pool that is given up, and one that is a reference, are not copied; the bits are PyTorch's."""
    jax = pytest.importorskip("jax")
    case = small_prefill(lengths=(30, 2, 65), slots=(7, -1, 60), size=64, fresh=(2,), tail=3, gate="scalar")
    want = call(case, whole(case))

    def given():
        return {name: None if x is None else jax.numpy.asarray(x) for name, x in case.arrays.items()}

    def step(states, rest):
        args, gates = arguments("prefill", rest | {"states": states})
        return serving.prefill(*args, **gates, platform="cuda")

    arrays = given()
    states = arrays.pop("states")
    function = jax.jit(step, donate_argnums=0).lower(states, arrays).compile()
    memory = function.memory_analysis()
    assert memory.alias_size_in_bytes >= states.nbytes
    assert memory.temp_size_in_bytes < states.nbytes / 2
    assert same(map(np.asarray, function(states, arrays)), want)
    pool = jax.new_ref(given()["states"])
    function = jax.jit(lambda pool, rest: step(pool, rest)[0]).lower(pool, arrays).compile()
    assert function.memory_analysis().temp_size_in_bytes < pool[...].nbytes / 2
    assert same((np.asarray(function(pool, arrays)), np.asarray(pool[...])), want)
