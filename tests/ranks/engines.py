"""Run by torchrun on two ranks: every engine, one after the other; what was measured goes to a JSON file."""

import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from safetensors.torch import load_file

import binmask_dist
from binmask_dist.method import graphs
from binmask_dist.method.layout import local_part, placements
from ranks import work
from ranks.averages import averages
from ranks.twin import Twin
from ranks.work import CASES, ENGINES, MIDDLE, Case


def snapshot(binmask) -> dict[str, torch.Tensor]:
    """Everything this rank's optimizer holds, to compare bit by bit."""
    found = {}
    for name, place in placements(binmask.param_groups, binmask.model).items():
        if place.holder is None:
            continue
        found[f"param:{name}"] = local_part(place.holder).detach().clone()
        for key, value in binmask.state[place.holder].items():
            if isinstance(value, torch.Tensor):
                found[f"{key}:{name}"] = local_part(value).detach().clone()
    return found


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    keys = sorted(ours.keys() ^ theirs.keys())
    return keys + [key for key in ours if key in theirs and not torch.equal(ours[key], theirs[key])]


def matrix(_: Path) -> dict:
    """Every case against one process on the same global batches (fp32), or against the engine's own twin (bf16)."""
    results = {}
    for case in CASES:
        accelerator = work.make_accelerator(case)
        model, optimizer, binmask = work.prepared(case, accelerator)
        own_clip = None if case.engine.startswith("zero") else case.max_norm
        twin = Twin(binmask, work.whole_parameters(binmask), own_clip)
        work.train(case, accelerator, model, optimizer, binmask)
        binmask.check_sync()
        whole, flips = work.whole_parameters(binmask), binmask.flips()
        twin_masks, twin_error = twin.differences(binmask, whole)
        result = dict(
            sparsity=binmask.sparsity(),
            layer_sparsity=binmask.layer_sparsity(),
            flips=[flips.on_to_off, flips.off_to_on],
            masks_differ_from_twin=twin_masks,
            error_from_twin=twin_error,
            zeros_where_masked=all(not whole[name][~mask].any() for name, mask in binmask.masks().items()),
        )
        if case.precision == "no":
            single, single_binmask = work.single_process(case)
            ours, theirs = binmask.masks(), single_binmask.masks()
            expected = single_binmask.flips()
            result |= dict(
                masks_differ=sum(int((ours[name] != theirs[name]).sum()) for name in ours),
                error=max(float((whole[n] - p).abs().max()) for n, p in single.named_parameters()),
                expected_sparsity=single_binmask.sparsity(),
                expected_layer_sparsity=single_binmask.layer_sparsity(),
                expected_flips=[expected.on_to_off, expected.off_to_on],
            )
        results[str(case)] = result
    return results


def resume(folder: Path) -> dict:
    """`save_state` in the middle of an epoch, then new objects, `load_state` and on to the end: the same bits."""
    results = {}
    for engine in ENGINES:
        for precision in ("no", "bf16"):
            case = Case(engine, precision)
            path = folder / f"state-{engine}-{precision}"
            accelerator = work.make_accelerator(case)
            model, optimizer, binmask = work.prepared(case, accelerator)
            work.train(case, accelerator, model, optimizer, binmask, stop=MIDDLE)
            accelerator.save_state(str(path))
            work.train(case, accelerator, model, optimizer, binmask, start=MIDDLE)
            expected, flips = snapshot(binmask), binmask.flips()

            accelerator = work.make_accelerator(case)
            model, optimizer, binmask = work.prepared(case, accelerator)
            accelerator.load_state(str(path))
            work.train(case, accelerator, model, optimizer, binmask, start=MIDDLE)
            results[f"{engine}-{precision}"] = dict(
                differs=differences(snapshot(binmask), expected), flips_equal=binmask.flips() == flips
            )
    return results


def checkpoints(folder: Path) -> dict:
    """Saved under each engine, loaded under each other one: equal to the last bit; and training goes on from there."""
    results = {}
    saved = {}
    for engine in ENGINES:
        case = Case(engine)
        accelerator = work.make_accelerator(case)
        model, optimizer, binmask = work.prepared(case, accelerator)
        work.train(case, accelerator, model, optimizer, binmask, stop=MIDDLE)
        binmask_dist.save_checkpoint(folder / engine, binmask, extra={"step": MIDDLE})
        saved[engine] = (work.whole_parameters(binmask), binmask.masks(), binmask.flips())
    model, binmask = work.single_process(Case("ddp"), stop=MIDDLE)  # which the caller has saved
    saved["single"] = ({name: p.detach() for name, p in model.named_parameters()}, binmask.masks(), binmask.flips())
    for target in ENGINES:
        for source in saved:
            case = Case(target)
            accelerator = work.make_accelerator(case)
            model, optimizer, binmask = work.prepared(case, accelerator)
            extra = binmask_dist.load_checkpoint(folder / source, binmask)
            whole, masks, flips = saved[source]
            ours = work.whole_parameters(binmask)
            result = dict(
                extra=extra,
                weights_equal=all(torch.equal(ours[name], whole[name]) for name in whole),
                masks_equal=all(torch.equal(mask, masks[name]) for name, mask in binmask.masks().items()),
                flips_equal=binmask.flips() == flips,
            )
            work.train(case, accelerator, model, optimizer, binmask, start=MIDDLE)
            _, single = work.single_process(case)
            expected = single.masks()
            result["masks_differ_at_the_end"] = sum(
                int((mask != expected[name]).sum()) for name, mask in binmask.masks().items()
            )
            results[f"{source}-to-{target}"] = result
    return results


def mixtures(folder: Path) -> dict:
    """Frozen weights, and masks that never learn because they have gradients in the warm-up alone: saved by one process
    and under ZeRO-3, loaded under every engine, where masks stay fixed.
    """
    results, expected = {}, {}

    def prepared(engine):
        accelerator = work.make_accelerator(Case(engine))
        model, binmask = work.build_frozen()
        return accelerator, binmask, *accelerator.prepare(model, binmask)

    def save(name, binmask):
        binmask_dist.save_checkpoint(folder / f"mixture-{name}", binmask)
        expected[name] = (work.whole_parameters(binmask), binmask.masks())

    model, binmask = work.build_frozen()
    x, y = work.make_data(MIDDLE, 1)
    for step in range(MIDDLE):
        binmask.set_epoch(4 * step // work.STEPS)
        (model(x[step, 0, 0]) - y[step, 0, 0]).square().mean().backward()
        if step >= 8:
            model.last.weight.grad = None
        binmask.step()
        binmask.zero_grad()
    save("single", binmask)
    accelerator, binmask, model, optimizer = prepared("zero3")
    work.train(Case("zero3"), accelerator, model, optimizer, binmask, stop=MIDDLE)
    save("zero3", binmask)
    for source, (weights, masks) in expected.items():
        for target in ENGINES:
            accelerator, binmask, model, optimizer = prepared(target)
            binmask_dist.load_checkpoint(folder / f"mixture-{source}", binmask)
            binmask.freeze()
            for group in binmask.param_groups:
                group["lr"] = 0.0
            work.train(Case(target), accelerator, model, optimizer, binmask, start=MIDDLE, stop=MIDDLE + 2)
            whole = work.whole_parameters(binmask)
            results[f"{source}-to-{target}"] = dict(
                masks_equal=all(torch.equal(mask, masks[name]) for name, mask in binmask.masks().items()),
                weights_equal=all(torch.equal(whole[name], weight) for name, weight in weights.items()),
                sparsity=binmask.sparsity(),
            )
    return results


def exports(folder: Path) -> dict:
    """The model as each engine saves it: sparsity is read back from the file."""
    results = {}
    for engine in ENGINES:
        case = Case(engine)
        accelerator = work.make_accelerator(case)
        model, optimizer, binmask = work.prepared(case, accelerator)
        work.train(case, accelerator, model, optimizer, binmask)
        accelerator.save_model(model, str(folder / f"model-{engine}"))
        accelerator.wait_for_everyone()
        tensors = load_file(folder / f"model-{engine}" / "model.safetensors")
        stock = work.Network()
        stock.load_state_dict(tensors)
        zeros = sum(int((tensors[name] == 0).sum()) for name in binmask.plan.masked)
        total = sum(tensors[name].numel() for name in binmask.plan.masked)
        clips_by_itself = model.gradient_clipping() if engine.startswith("zero") else 0.0
        asked = [_error(accelerator.clip_grad_norm_, model.parameters(), limit) for limit in (0, 1)]
        results[engine] = dict(
            from_file=zeros / total, live=binmask.sparsity(), clips_by_itself=clips_by_itself, asked_to_clip=asked
        )
    return results


class Wide(nn.Module):
    """Large enough that the bytes of a step drown anything else on the loopback device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))

    def forward(self, x):
        return self.layers(x)


def wire(_: Path) -> dict:
    """Bytes over the loopback device per step, masks learning, against dense training."""
    results = {}
    for engine in ENGINES:
        sent = {}
        for kind in ("dense", "binmask"):
            accelerator = work.make_accelerator(Case(engine))
            model = Wide()
            optimizer = work.make_optimizer(model)
            binmask = None
            if kind == "binmask":
                settings = work.MASK | dict(warmup=0.0)
                optimizer = binmask = binmask_dist.patch(model, optimizer, **settings)
                binmask.set_epoch(0)
            model, optimizer = accelerator.prepare(model, optimizer)
            x = torch.randn(8, 512)

            def bytes_of(steps, model=model, optimizer=optimizer, accelerator=accelerator, x=x) -> int:
                dist.barrier()
                before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
                for _ in range(steps):
                    accelerator.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                dist.barrier()
                return psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before

            bytes_of(2)  # sets up buckets and states
            # the least of three: acknowledgements and other programs only ever add
            sent[kind] = min(bytes_of(10) for _ in range(3))
        results[engine] = sent
    return results


def compiled(_: Path) -> dict:
    """The compiled step on each kind of tensor that it meets, under a compiled model, against one eager process."""
    results = {}
    for engine in ("ddp", "fsdp2", "zero3"):
        case = Case(engine)
        accelerator = work.make_accelerator(case)
        model, binmask = work.build(case, compile=True)
        if engine == "ddp":  # the other two break the graph themselves, to gather parameters
            model.compile(fullgraph=True)
        model, optimizer = accelerator.prepare(model, binmask)
        work.train(case, accelerator, model, optimizer, binmask)
        _, single = work.single_process(case)
        expected = single.masks()
        different = sum(int((mask != expected[name]).sum()) for name, mask in binmask.masks().items())
        results[engine] = dict(
            masks_differ=different, flips=binmask.flips().on_to_off, compiled=not graphs.compiler_failed()
        )
    return results


def settled(_: Path) -> dict:
    """Masks are settled at a sparsity and fixed, in the middle of training: as on one process, and it stays that."""
    results = {}
    for engine in ENGINES:
        case = Case(engine)
        accelerator = work.make_accelerator(case)
        model, optimizer, binmask = work.prepared(case, accelerator)
        work.train(case, accelerator, model, optimizer, binmask, stop=MIDDLE)
        before = binmask.sparsity()
        binmask.settle(0.3)
        binmask.freeze()
        work.train(case, accelerator, model, optimizer, binmask, start=MIDDLE)
        _, single = work.single_process(case, stop=MIDDLE)
        single.settle(0.3)
        masks, expected, whole = binmask.masks(), single.masks(), work.whole_parameters(binmask)
        results[engine] = dict(
            before=before,
            after=binmask.sparsity(),
            masks_differ=sum(int((mask != expected[name]).sum()) for name, mask in masks.items()),
            zeros_where_masked=all(not whole[name][~mask].any() for name, mask in masks.items()),
            weights_where_not=min(float((whole[name][mask] != 0).float().mean()) for name, mask in masks.items()),
            flips_equal=binmask.flips() == single.flips(),
        )
    return results


def faults(_: Path) -> dict:
    """NaN on one rank, ranks that drift apart."""
    results = {}
    for engine in ENGINES:
        case = Case(engine)
        accelerator = work.make_accelerator(case)
        model, optimizer, binmask = work.prepared(case, accelerator)
        work.train(case, accelerator, model, optimizer, binmask, stop=20)
        before = snapshot(binmask)
        x, y = work.make_data(1, 1)
        if accelerator.process_index == 1:
            x[...] = float("nan")
        accelerator.backward((model(x[0, 0, 0]) - y[0, 0, 0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        skipped = model.skipped_steps if engine.startswith("zero") else binmask.skipped_steps
        results[f"nan-{engine}"] = dict(skipped=skipped, changed=differences(snapshot(binmask), before))
        work.train(case, accelerator, model, optimizer, binmask, start=20)
        results[f"nan-{engine}"]["sparsity"] = binmask.sparsity()

    accelerator = work.make_accelerator(Case("ddp"))
    model, optimizer, binmask = work.prepared(Case("ddp"), accelerator)
    work.train(Case("ddp"), accelerator, model, optimizer, binmask, stop=20)
    if accelerator.process_index == 1:
        binmask.state[binmask.model.third.weight]["latent"][0, 0] += 1e-3
    results["drift"] = _error(binmask.check_sync)
    binmask.set_epoch(accelerator.process_index)
    results["epochs"] = _error(binmask.check_sync)
    return results


def _error(call, *arguments) -> str:
    try:
        call(*arguments)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


ALL = (matrix, resume, checkpoints, mixtures, averages, exports, wire, compiled, settled, faults)
if __name__ == "__main__":
    work.run_jobs(*ALL)
