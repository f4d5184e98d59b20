"""A moving average of the weights under every engine: updated, put in place of the weights, saved and loaded."""

import copy
from pathlib import Path

import torch

import binmask_dist
from binmask_dist.method.layout import in_model, local_part, placements
from binmask_dist.training.averaging import Average
from ranks import work
from ranks.work import ENGINES, MIDDLE, STEPS, Case

DECAY = 0.8
# elements; under ZeRO-3 some weights then stay gathered, and others do not
PERSIST_BELOW = dict(stage3_param_persistence_threshold=300)
ON_THE_CPU = dict(offload_param=dict(device="cpu"), offload_optimizer=dict(device="cpu"))
COPY_IN_EACH_HOST = dict(zero_hpz_partition_size=2)
# by name: the case, and settings of ZeRO-3
CASES: dict[str, tuple[Case, dict]] = {
    **{engine: (Case(engine), PERSIST_BELOW) for engine in ENGINES},
    **{f"{engine}-bf16": (Case(engine, "bf16"), PERSIST_BELOW) for engine in ("fsdp2", "zero2", "zero3")},
    "zero3-offload": (Case("zero3"), PERSIST_BELOW | ON_THE_CPU),
    "zero3-hpz": (Case("zero3"), PERSIST_BELOW | COPY_IN_EACH_HOST),
}


def single_process(stop: int = STEPS):
    """model, binmask and average of one process on the same global batches."""
    model, binmask = work.build_frozen()
    average = Average(model, DECAY)
    for step in range(stop):
        work.continue_single_process(Case("ddp"), model, binmask, start=step, stop=step + 1)
        average.update()
    return model, binmask, average


class Job:
    """Everything of one run under an engine."""

    def __init__(self, case: Case, settings: dict) -> None:
        self.case = case
        self.accelerator = work.make_accelerator(case)
        if case.engine == "zero3":
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            config["zero_optimization"] |= settings
        model, self.binmask = work.build_frozen()
        self.model, self.optimizer = self.accelerator.prepare(model, self.binmask)
        self.bare = self.accelerator.unwrap_model(self.model)
        self.average = Average(self.bare, DECAY)

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            work.train(self.case, self.accelerator, self.model, self.optimizer, self.binmask, step, step + 1)
            self.average.update()

    def parts(self) -> dict[str, torch.Tensor]:
        """What this rank has of the model, the optimizer's weights and latents, and the average; without padding."""
        found = {f"average:{name}": value.clone() for name, value in self.average.averages.items()}
        for name, param in self.bare.named_parameters():
            place = in_model(name, param)
            found[f"model:{name}"] = place.local(place.holder.detach()).clone()
        for name, place in placements(self.binmask.param_groups, self.bare).items():
            if place.holder is not None:
                state = self.binmask.state[place.holder]
                kept = {"weight": place.holder.detach(), "latent": state.get("latent"), "w": state.get("weight")}
                found |= {f"{k}:{name}": local_part(place.local(v)).clone() for k, v in kept.items() if v is not None}
        return found

    def averages(self) -> dict[str, torch.Tensor]:
        where = self.average.where
        values = self.average.averages
        return {name: where[name].gather(values[name], torch.float32).clone() for name in where}

    def model_parameters(self) -> dict[str, torch.Tensor]:
        """What the model computes with, whole."""
        where = {name: in_model(name, param) for name, param in self.bare.named_parameters()}
        dtypes = {name: param.dtype for name, param in self.bare.named_parameters()}
        return {n: p.gather(p.local(p.holder.detach()), dtypes[n]).clone() for n, p in where.items()}

    def gathered(self) -> dict[str, bool]:
        """Of each parameter that ZeRO-3 has gathered at the moment: whether it is what the partitions say."""
        whole, found = self.model_parameters(), {}
        for name, param in self.bare.named_parameters():
            if hasattr(param, "ds_status") and param.ds_status.name == "AVAILABLE":
                found[name] = torch.equal(param.detach(), whole[name])
        return found

    @torch.no_grad()
    def output(self) -> torch.Tensor:
        self.model.eval()
        x = work.make_data(1, 1)[0][0, 0, 0]
        output = self.model(x.to(self.bare.first.bias.dtype) if self.case.engine.startswith("zero") else x)
        self.model.train()
        return output.float()


def averages(folder: Path) -> dict:
    """Every case: against one process (fp32), put in and taken out again, saved and gone on from, read by others."""
    results = {}
    _, single, expected = single_process(MIDDLE)
    for key, (case, settings) in CASES.items():
        job = Job(case, settings)
        job.train(0, MIDDLE)
        path = folder / f"average-{key}"
        result = _put_in_and_out(job)
        if case.precision == "no":
            ours, masks = job.averages(), job.binmask.masks()
            result |= dict(
                error=max(float((ours[name] - value).abs().max()) for name, value in expected.averages.items()),
                masks_differ=sum(int((masks[name] != mask).sum()) for name, mask in single.masks().items()),
            )
        binmask_dist.save_checkpoint(path, job.binmask)
        job.average.save(path, job.accelerator)
        job.accelerator.wait_for_everyone()
        saved = job.parts()
        job.train(MIDDLE, STEPS)
        at_the_end = job.parts()

        job = Job(case, settings)
        result["differs_when_loaded"] = _load(job, path, saved)
        job.train(MIDDLE, STEPS)
        result["differs_when_resumed"] = _different(job.parts(), at_the_end)
        if case.precision == "no":
            job.average.load(folder / "average-single")
            read = job.averages()
            result["reads_one_process"] = all(torch.equal(read[n], v) for n, v in expected.averages.items())
        if case.engine == "zero3":
            result["copy"] = _refusal_of_a_copy(job)
        results[key] = result
    return results


def _refusal_of_a_copy(job: Job) -> str:
    try:
        job.binmask.apply_masks_(copy.deepcopy(job.bare))
    except ValueError as error:
        return str(error)
    return ""


def _load(job: Job, path: Path, saved: dict[str, torch.Tensor]) -> list[str]:
    job.train(0, 2)  # so that weights are gathered from a forward pass before
    binmask_dist.load_checkpoint(path, job.binmask)
    job.average.load(path)
    return _different(job.parts(), saved)


def _put_in_and_out(job: Job) -> dict:
    before, output, averages, masks = job.parts(), job.output(), job.averages(), job.binmask.masks()
    with job.average.applied(job.bare, job.binmask):
        expected = {name: value * masks.get(name, True) for name, value in averages.items()}
        inside = job.model_parameters()
        of_average, gathered = job.output(), job.gathered()
        state = job.accelerator.get_state_dict(job.model) or {}  # on the first rank
        saved = {name: value.to(inside[name].dtype) for name, value in state.items()}
        wrong_in_file = [name for name, value in saved.items() if not torch.equal(value, inside[name])]
    stock = work.Frozen()
    stock.load_state_dict(inside)
    left = job.parts()
    return dict(
        saved=len(saved),
        wrong_in_file=wrong_in_file,
        wrong_inside=[n for n, value in inside.items() if not torch.equal(value, expected[n].to(value.dtype))],
        nonzero_where_masked=[name for name, mask in masks.items() if inside[name][~mask].any()],
        masked_by_us=sum(int(averages[name][~mask].count_nonzero()) for name, mask in masks.items()),
        output_error=float((of_average - stock(work.make_data(1, 1)[0][0, 0, 0])).abs().max()),
        output_moved=float((of_average - output).abs().max()),
        changed_outside=_different(left, before),
        output_as_before=torch.equal(job.output(), output),
        persisted=[name for name, param in job.bare.named_parameters() if getattr(param, "ds_persist", False)],
        gathered=[gathered, job.gathered()],
    )


def _different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    keys = sorted(ours.keys() ^ theirs.keys())
    return keys + [key for key in ours if key in theirs and not torch.equal(ours[key], theirs[key])]
