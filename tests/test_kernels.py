"""The step's functions over tensors: one compiled graph, the same bits eagerly, no further copy of a parameter."""

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

from binmask_dist.method import algorithm, graphs, joining, kernels
from binmask_dist.method.updates import _NESTEROV, sgd

SHAPES = [
    (7, 5),
    (1, 7),
    (64,),
    (3, 3, 3),
    (32, 16, 3, 3),
    (5, 1),
    (2,),
    (129, 65),
    (16, 16),
    (8, 4, 1, 1),
    (100, 3),
    (9, 9),
]
NESTEROV = _NESTEROV[True]
SCALARS = algorithm.Scalars(3, lam=1e-3, rate=0.2, betas=(0.9, 0.999), eps=1e-8, alpha1=1.0, clip=0.7)


def tensors(shape, dtype=torch.float32, memory_format=torch.contiguous_format, seed=0):
    """grad, weight, latent, exp_avg, exp_avg_sq."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for _ in range(5)]
    values[2] *= 0.1
    values[4] = values[4].abs()
    values[:2] = [value.to(dtype) for value in values[:2]]
    return [value.to(memory_format=memory_format) for value in values] if len(shape) == 4 else values


def step(compiled, *args, **kwargs):
    grad, weight, latent, exp_avg, exp_avg_sq = tensors(*args, **kwargs)
    param = torch.empty_like(weight)
    flips = kernels.learn_([(grad, weight, latent, exp_avg, exp_avg_sq)], SCALARS, compiled)
    kernels.product_([(param, weight, latent)], compiled)
    return grad, latent, exp_avg, exp_avg_sq, param, flips[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_and_eager_differ_by_rounding_only(dtype):
    for shape in SHAPES:
        eager, compiled = step(False, shape, dtype), step(True, shape, dtype)
        for ours, theirs in zip(eager[:4], compiled[:4], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
        assert torch.equal(eager[1] >= 0, compiled[1] >= 0)
        torch.testing.assert_close(eager[4], compiled[4])
        assert torch.equal(eager[5], compiled[5])
    assert not graphs.compiler_failed()


def test_one_graph_for_all_shapes_and_scalars():
    graphs._graphs.clear()
    torch._dynamo.utils.counters.clear()
    for seed, shape in enumerate(SHAPES):
        step(True, shape, seed=seed)
    for rate in (0.1, 1e-3, 1e-5):
        scalars = algorithm.Scalars(9, lam=rate, rate=rate, betas=(0.9, 0.999), eps=1e-8, alpha1=1.0)
        kernels.learn_([tensors((11, 13))], scalars, True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(graphs._graphs) == 2  # learn_ and product_


def test_one_graph_for_each_known_update():
    graphs._graphs.clear()
    torch._dynamo.utils.counters.clear()
    for lr in (0.1, 0.01):
        for shape in SHAPES:
            grad, weight, latent, exp_avg, exp_avg_sq = tensors(shape)
            param, buffer = torch.empty_like(weight), torch.zeros_like(weight)
            arguments = (grad, weight, latent, exp_avg, exp_avg_sq, param, buffer)
            assert kernels.learn_and_update_(NESTEROV, [arguments], SCALARS, [lr, 0.0, 0.9, 1.0])[0] is not None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(graphs._graphs) == 1


def test_what_was_updated_is_said_even_if_another_dtype_cannot_be_compiled(monkeypatch):
    compile_any = graphs._compile

    def compile_fp32(function, arguments):
        if arguments[0].dtype != torch.float32:
            raise RuntimeError("no such type")
        return compile_any(function, arguments)

    monkeypatch.setattr(graphs, "_compile", compile_fp32)
    monkeypatch.setattr(graphs, "_graphs", {})
    monkeypatch.setattr(graphs, "_compiler_failed", False)
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    rows = [(torch.ones(8, dtype=dtype), torch.ones(8, dtype=dtype)) for dtype in dtypes]
    with pytest.warns(UserWarning, match="could not be compiled"):
        done = kernels.update_(sgd, rows, SCALARS, [0.1, 0.0])
    assert done == [bool((param != 1).all()) for _, param in rows] == [True, False, False]


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_a_small_first_weight_does_not_keep_the_others_to_one_core():
    graphs._graphs.clear()
    with fresh_cache():
        _, code = run_and_get_code(lambda: kernels.learn_([tensors((2, 5))], SCALARS, True))
    assert "num_threads(3)" in "".join(code)


def test_another_number_of_threads_is_another_graph(request):
    graphs._graphs.clear()
    step(True, (7, 5))
    request.getfixturevalue("three_threads")
    step(True, (7, 5))
    assert len(graphs._graphs) == 4  # learn_ and product_, twice


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_order_does_not_matter(compiled):
    """channels_last weights are dense but not contiguous; a gradient may even come in another order."""
    plain = step(compiled, (8, 6, 5, 5))
    other = step(compiled, (8, 6, 5, 5), memory_format=torch.channels_last)
    for ours, theirs in zip(plain, other, strict=True):
        torch.testing.assert_close(ours, theirs)  # torch's fused Adam rounds the end of a run of memory differently
    grad, weight, latent, exp_avg, exp_avg_sq = tensors((8, 6, 5, 5), memory_format=torch.channels_last)
    grad = grad.contiguous()
    kernels.learn_([(grad, weight, latent, exp_avg, exp_avg_sq)], SCALARS, compiled)
    torch.testing.assert_close(latent, plain[1])  # a mixed order is always eager
    torch.testing.assert_close(grad, plain[0])


def test_large_tensors_are_cut_into_pieces_that_add_up(monkeypatch):
    whole = step(False, (300, 40))
    monkeypatch.setattr(kernels, "EAGER_PIECE", 1000)
    for ours, theirs in zip(whole, step(False, (300, 40)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert whole[-1] > 100


def test_empty_tensors_do_nothing():
    assert step(False, (0, 7))[-1] is None


@pytest.mark.parametrize("owns_memory", [False, True])
def test_small_weights_taken_together_are_the_same_to_the_last_bit(monkeypatch, owns_memory):
    shapes = [(7, 5), (1, 7), (0, 3), (1,), (33, 17), (4, 3, 3, 3), (200, 9), (64, 40)]
    dtypes = [torch.float32] * 6 + [torch.bfloat16] * 2

    def all_rows():
        rows = [
            tensors(shape, dtype, seed=seed) for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        rows[5] = tensors(shapes[5], memory_format=torch.channels_last)
        return rows

    def run(rows):
        flips = kernels.learn_(rows, SCALARS, compiled=False, owns_memory=owns_memory)
        params = [torch.empty_like(row[1]) for row in rows]
        kernels.product_([(param, row[1], row[2]) for param, row in zip(params, rows, strict=True)], compiled=False)
        return flips, params

    monkeypatch.setattr(joining, "TOGETHER", 700)  # so that there are several batches
    rows = all_rows()
    batches = list(joining.together([kernels._flat_views(row) for row in rows]))
    assert sorted(chain(*batches)) == list(range(len(rows)))
    assert sorted(map(len, batches)) == [1, 1, 1, 1, 4]
    flips, params = run(rows)
    largest = max(batches, key=len)
    for column in range(5):
        together = joining.as_one([rows[index][column] for index in largest])
        assert (together is not None) == (owns_memory and column > 0)  # gradients stay where they are
    assert rows[5][2].is_contiguous(memory_format=torch.channels_last)

    monkeypatch.setattr(joining, "LARGEST", 0)
    alone = all_rows()
    flips_alone, params_alone = run(alone)
    assert [None if count is None else int(count) for count in flips] == [
        None if count is None else int(count) for count in flips_alone
    ]
    assert sum(int(count) for count in flips if count is not None) > 100
    for ours, theirs in zip(chain(*rows, params), chain(*alone, params_alone), strict=True):
        assert torch.equal(ours, theirs)


MEASURE_PEAK = """
import sys, torch, binmask_dist
compiled = sys.argv[1] == "compiled"
torch.set_num_threads(1)
layer = torch.nn.Linear(4096, 2048, bias=False)
size = layer.weight.numel() * 4
binmask = binmask_dist.patch(
    layer, torch.optim.SGD(layer.parameters(), lr=0.1, fused=True), lam=1e-4, epochs=1, warmup=0.0, compile=compiled
)
binmask.set_epoch(0)
gradient = torch.randn_like(layer.weight)

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

for step in range(4):
    layer.weight.grad = gradient
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
    before = status("VmRSS")
    binmask.step()
peak = (status("VmHWM") - before) / size
from binmask_dist.method import graphs
print(peak, graphs.compiler_failed())
"""


@pytest.mark.parametrize(("kind", "limit"), [("compiled", 0.2), ("eager", 3.0)])
def test_peak_memory_during_a_step(kind, limit):
    """In copies of the parameter, by the process's own high-water mark."""
    run = subprocess.run([sys.executable, "-c", MEASURE_PEAK, kind], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    peak, failed = run.stdout.split()
    assert failed == "False"
    assert float(peak) <= limit


WITHOUT_COMPILER = """
import warnings, torch, binmask_dist
masks = []
for compiled in (True, False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    binmask = binmask_dist.patch(
        model, torch.optim.SGD(model.parameters(), lr=0.1),
        lam=1e-3, epochs=2, warmup=0.5, mask_lr=0.05, compile=compiled,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(25):
            binmask.set_epoch(step // 5)
            model(torch.ones(16, 8) * step).square().mean().backward()
            binmask.step()
            binmask.zero_grad()
    masks.append(binmask.masks())
    print(sum("could not be compiled and runs eagerly" in str(w.message) for w in caught))
print(all(torch.equal(masks[0][name], masks[1][name]) for name in masks[0]), binmask.sparsity() > 0)
"""


def test_a_host_without_a_compiler_says_so_once_and_gets_the_same_masks(tmp_path):
    environment = {**os.environ, "CXX": str(tmp_path / "no-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[1],
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["1", "0", "True", "True"]
