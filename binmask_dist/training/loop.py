"""The training loop: one for all tasks, models and engines."""

import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from binmask_dist import BinMask
from binmask_dist.training.averaging import Average
from binmask_dist.training.checkpoints import Checkpoints
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.environment import memory_record
from binmask_dist.training.evaluation import batch_statistics, evaluate
from binmask_dist.training.interruption import Interruption
from binmask_dist.training.loading import evaluation_loader, make_loaders, steps_per_epoch
from binmask_dist.training.masking import attach_method
from binmask_dist.training.models import tie_again
from binmask_dist.training.optimizers import learning_rate
from binmask_dist.training.progress import Progress
from binmask_dist.training.run_folder import RunFolder
from binmask_dist.training.steering import Course, Steering
from binmask_dist.training.tasks.base import Batch, RunError, Task, seed_everything
from binmask_dist.training.tracking import Tracking, flips_so_far, mask_record

NO_FLIPS = {"on_to_off": 0, "off_to_on": 0, "returns": 0}


@dataclass
class Position:
    """Where a run is: with the model and the optimizer, all that a checkpoint needs."""

    epoch: int = 0  # over training and fine-tuning
    step_in_epoch: int = 0
    step: int = 0  # since the start
    epoch_sums: list[float] | None = None  # of `Loop.measured` over the steps of this epoch, mean over processes
    epoch_good_steps: int = 0  # those that the sums are over: with on_nan skip, steps with a bad loss are left out
    interval_loss: float = 0.0  # the same of the loss, since the last record of a step
    interval_good_steps: int = 0
    seconds: float = 0.0
    flips: dict[str, int] | None = None  # `flips_so_far` at the start of this epoch
    steering: dict[str, Any] | None = None  # its course
    best: float | None = None
    epochs_since_best: int = 0
    before_finetuning: dict[str, Any] | None = None
    loss_scaler: dict[str, Any] | None = None  # of fp16


class Interrupted(Exception):
    """A signal asked the run to end; it has been saved, if the disk let it."""

    def __init__(self, signal: int, is_saved: bool) -> None:
        if is_saved:
            super().__init__("interrupted and saved; the same command with --resume goes on")
        else:
            super().__init__(
                "interrupted, and could not be saved; --resume goes on from the checkpoint before, or anew"
            )
        self.exit_code = 128 + signal  # as if the signal had ended it: launchers know these


class Loop:
    """A model, its data and where the run is. `run` goes on from there to the end."""

    def __init__(self, config: TrainConfig, task: Task, folder: RunFolder, accelerator: Accelerator) -> None:
        self.config, self.task, self.accelerator = config, task, accelerator
        self.steps_per_epoch = steps_per_epoch(config, task)
        self.epochs = config.epochs + config.finetune_epochs
        train_loader, test_loader, self.sampler = make_loaders(task, config, accelerator.num_processes)
        set_seed(config.seed)
        model = task.make_model()
        self.method = attach_method(model, config, accelerator, config.epochs * self.steps_per_epoch)
        size = checkpoint_size(model)
        self.model, self.optimizer, self.train_loader, self.test_loader = accelerator.prepare(
            model, self.method, train_loader, test_loader
        )
        self.judge, self.judge_loader = "test", self.test_loader
        if task.validation is not None:
            self.judge, self.judge_loader = "validation", self._evaluation_loader(task.validation)
        self.bare_model = accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self.average = Average(self.bare_model, config.ema_decay) if config.ema_decay else None
        self.steering: Steering | None = None
        if config.target_sparsity and isinstance(self.method, BinMask):  # other methods go there by themselves
            self.steering = Steering(self.method, config, self.steps_per_epoch)
        self.checkpoints = Checkpoints(
            folder.path / "checkpoints", config.keep_checkpoints, self.method, self.average, accelerator
        )
        self.checkpoints.check_space(size)
        self.position = Position()
        resumed = self.checkpoints.load_newest()
        if resumed is not None:
            self.position = Position(**resumed)
            if self.steering and self.position.steering:
                self.steering.course = Course(**self.position.steering)
            if accelerator.scaler and self.position.loss_scaler:
                accelerator.scaler.load_state_dict(self.position.loss_scaler)
        resume_step = None if resumed is None else self.position.step
        self.tracking = Tracking(folder.path, config, accelerator, resume_step, self.position.epoch)
        self.progress = Progress(self.epochs, self.steps_per_epoch, accelerator, self.position.step)
        self.interruption = Interruption(accelerator.device)
        self.signal = 0
        self.measured = ("loss", *task.training_metrics)  # of every step
        # over steps that are not yet in the position
        self.sums = torch.zeros(len(self.measured), dtype=torch.float64, device=accelerator.device)
        self.clock = time.perf_counter()
        self.interval_start = (self.position.step, self.clock)  # of the steps that the next record is of

    def run(self) -> None:
        """Train to the end of the last epoch."""
        with self.interruption:
            while self.position.epoch < self.epochs:
                self._train_epoch()
                self._end_epoch()
        self.progress.close()

    # -- an epoch

    def _train_epoch(self) -> None:
        config, position = self.config, self.position
        self.method.set_epoch(min(position.epoch, config.epochs - 1))
        if position.epoch >= config.epochs:
            self.method.freeze()
        elif self.steering:
            self.steering.begin_epoch(position.epoch, position.step_in_epoch)
        self.model.train()
        batches = self._batches()
        self.interval_start = (position.step, time.perf_counter())
        while position.step_in_epoch < self.steps_per_epoch:
            self._step(batches)
            position.step_in_epoch += 1
            position.step += 1
            if self.average:
                self.average.update()
            if self.steering:
                self.steering.after_step(position.epoch, position.step_in_epoch)
            self._after_step()
        batches.close()

    def _batches(self) -> Generator[Batch]:
        """The training batches of this epoch from the present step on."""
        position, done = self.position, self.position.step_in_epoch
        loader = self.train_loader
        loader.set_epoch(position.epoch)  # before skip_first_batches, which copies it
        if self.sampler:
            self.sampler.set_position(position.epoch, done * self.config.batch_size)
        elif done:
            loader = self.accelerator.skip_first_batches(loader, done * self.config.accumulation)
        try:
            yield from loader
        finally:
            loader.end()  # of a stream that is left in the middle, which Accelerate would take for the current one

    def _step(self, batches: Iterator[Batch]) -> None:
        """One update of the weights and masks, from one batch in `accumulation` parts."""
        config, position = self.config, self.position
        rate = learning_rate(config, position.epoch + position.step_in_epoch / self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        buffers = [buffer.clone() for buffer in self.model.buffers()] if config.on_nan == "skip" else []
        means = torch.zeros_like(self.sums)
        for part in range(config.accumulation):
            batch = next(batches)
            seed_everything(config.seed, position.step, part, self.accelerator.process_index)
            with self.accelerator.accumulate(self.model):
                means += self._pass(batch) / config.accumulation
                self.optimizer.step()
                self.optimizer.zero_grad()
        now = config.on_nan == "skip" or self._is_seen()
        self.signal, bad_step = self.interruption.agree(position.step, ~means[0].isfinite(), now)
        if bad_step is not None:
            self._bad_loss(bad_step, buffers)
        else:
            self.sums += means
            position.epoch_good_steps += 1
            position.interval_good_steps += 1

    def _pass(self, batch: Batch) -> Tensor:
        """Forwards and backwards, once for each of the masks that are drawn for a batch. Returns what was measured."""
        samples = self.config.mask_samples if self.position.epoch < self.config.epochs else 1  # then masks are fixed
        measured = []
        for sample in range(samples):
            if sample:
                self.method.next_sample()
            means = self.task.learn(self.model, batch)
            self.accelerator.backward(means["loss"] / samples if samples > 1 else means["loss"])
            measured.append(torch.stack([means[name].detach() for name in self.measured]))
        return torch.stack(measured).mean(dim=0) if samples > 1 else measured[0]

    def _is_seen(self) -> bool:
        """Whether something is recorded or saved after the present step: a bad loss must be known before."""
        step, every = self.position.step + 1, (self.config.log_every, self.config.checkpoint_every)
        is_last = self.position.step_in_epoch + 1 == self.steps_per_epoch
        return is_last or any(number and step % number == 0 for number in every)

    def _bad_loss(self, step: int, buffers: list[Tensor]) -> None:
        self._stop_if_asked("the loss", step)
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)  # running statistics that have seen a NaN stay NaN

    def _stop_if_asked(self, what: str, step: int) -> None:
        if self.config.on_nan == "stop":
            if self.checkpoints.exist:
                advice = "the last good checkpoint is kept: go on from it with --resume --on_nan skip, or start anew"
            else:
                advice = "there is no checkpoint yet: start anew under another --name,"
            raise RunError(f"{what} is NaN or inf at step {step}; {advice} with a lower --lr or with --clip")

    def _after_step(self) -> None:
        config, position = self.config, self.position
        self.progress.step(self._log_step() if position.step % config.log_every == 0 else None)
        is_last = position.step_in_epoch == self.steps_per_epoch
        if self.signal:
            raise Interrupted(self.signal, self.save())
        if config.checkpoint_every and position.step % config.checkpoint_every == 0 and not is_last:
            self.save()

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing because a gradient was not finite. ZeRO looks for them itself, and starts to count
        anew with every start of the job."""
        return self.method.skipped_steps + getattr(self.model, "skipped_steps", 0)

    def _end_epoch(self) -> None:
        position = self.position
        self._fold_sums()
        judged = self._evaluate(self.judge, self.judge_loader)
        if not math.isfinite(judged[f"{self.judge}_loss"]):  # the last step was too far, and must not be saved as good
            self._stop_if_asked(f"the {self.judge} loss", position.step)
        record = {
            "kind": "epoch",
            "phase": "train" if position.epoch < self.config.epochs else "fine-tune",
            "epoch": position.epoch,
            "step": position.step,
            **self._means_of_epoch(),
            **judged,
            **mask_record(self.method, position.flips or NO_FLIPS),
            "skipped_steps": self.skipped_steps,
            **memory_record(),
            "seconds": self._seconds(),
        }
        self.tracking.log(record)
        self.progress.epoch(record)
        position.epoch, position.step_in_epoch = position.epoch + 1, 0
        position.epoch_sums, position.epoch_good_steps = None, 0
        if self.config.patience and record["phase"] == "train":
            self._look_for_the_best(record)
        if position.epoch == self.config.epochs and self.config.finetune_epochs:
            position.before_finetuning = self._evaluate("test", self.test_loader)
            if self.config.batch_statistics:
                with batch_statistics(self.bare_model):
                    position.before_finetuning["batch_statistics"] = self._evaluate("test", self.test_loader)
        position.flips = flips_so_far(self.method)
        is_saved = self.save()
        if self.signal:
            raise Interrupted(self.signal, is_saved)

    def _look_for_the_best(self, record: dict[str, Any]) -> None:
        """Early stopping: keep the best epoch, and go on from it when there was no better one for too long."""
        config, position = self.config, self.position
        metric = config.metric or self.task.metric
        value = record[f"{self.judge}_{metric}"] * (-1 if metric in ("loss", "perplexity") else 1)
        if position.best is None or value > position.best:
            before = position.best
            position.best, position.epochs_since_best = value, 0
            if not self.checkpoints.save_best(position.step, asdict(position)):
                position.best = before  # what could not be written cannot be gone back to
        else:
            position.epochs_since_best += 1
        if position.epochs_since_best >= config.patience or position.epoch == config.epochs:
            position.epoch = config.epochs
            if position.best is not None:
                self.checkpoints.load_best()

    # -- what the epoch is made of

    @contextmanager
    def _to_be_judged(self) -> Iterator[None]:
        """The model is what would be saved now."""
        average = self.average.applied(self.bare_model, self.method) if self.average else nullcontext()
        with self.method.for_evaluation(), average:
            yield

    def evaluate(self) -> dict[str, float | int]:
        """The figures of a run: on the test data, and on those that it was trained and chosen by where these count."""
        figures = self._evaluate("test", self.test_loader)
        if self.task.validation is not None:
            figures |= self._evaluate("validation", self.judge_loader)
        if self.task.measures_training:
            figures |= self._evaluate("train", self._evaluation_loader(self.task.train))
        return figures

    def _evaluate(self, part: str, loader: DataLoader) -> dict[str, Any]:
        with self._to_be_judged():
            return evaluate(self.task, self.model, loader, self.accelerator, part)

    def _evaluation_loader(self, part: Any) -> DataLoader:
        loader = evaluation_loader(self.task, part, self.config, self.accelerator.num_processes)
        return self.accelerator.prepare_data_loader(loader)

    def save_model(self, folder: Path) -> list[Path]:
        """Write the model, or its average, gathered from all processes; the safetensors files on the main one."""
        with self._to_be_judged():
            state = self.accelerator.get_state_dict(self.model)  # collective
            if not self.accelerator.is_main_process:
                return []
            state = {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}
            return self.task.save_model(self.bare_model, tie_again(self.bare_model, state), folder)

    def save(self) -> bool:
        """Whether it could be written."""
        self._fold_sums()
        self._seconds()
        self.position.steering = asdict(self.steering.course) if self.steering else None
        self.position.loss_scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler else None
        return self.checkpoints.save(self.position.step, asdict(self.position))

    def _log_step(self) -> float:
        """Returns the mean loss since the last record."""
        position = self.position
        self._fold_sums()
        (first, start), now = self.interval_start, time.perf_counter()
        steps, seconds = position.step - first, now - start
        self.interval_start = (position.step, now)  # so that the next interval contains what logging takes
        loss = mean(position.interval_loss, position.interval_good_steps)
        self.tracking.log(
            {
                "kind": "step",
                "step": position.step,
                "epoch": position.epoch + position.step_in_epoch / self.steps_per_epoch,
                "loss": loss,
                "lr": self.optimizer.param_groups[0]["lr"],
                "mask_lr": self.method.mask_lr,
                "lam": self.method.masked_groups[0]["lam"],
                "grad_norm": self.method.grad_norm,
                "steps_per_second": steps / seconds,
                "examples_per_second": steps * self.config.batch_size / seconds,
            }
        )
        position.interval_loss, position.interval_good_steps = 0.0, 0
        return loss

    def _fold_sums(self) -> None:
        """Add what each process has summed up to the position, which all of them share."""
        new = self.accelerator.reduce(self.sums, "mean").tolist()
        before = self.position.epoch_sums or [0.0] * len(new)
        self.position.epoch_sums = [old + more for old, more in zip(before, new, strict=True)]
        self.position.interval_loss += new[0]
        self.sums = torch.zeros_like(self.sums)

    def _means_of_epoch(self) -> dict[str, float]:
        """While the weights changed, and with what is random in training: not what the weights at its end come to."""
        sums, steps = self.position.epoch_sums or [], self.position.epoch_good_steps
        return {f"train_{name}": mean(value, steps) for name, value in zip(self.measured, sums, strict=True)}

    def _seconds(self) -> float:
        now = time.perf_counter()
        self.position.seconds += now - self.clock
        self.clock = now
        return self.position.seconds


def mean(total: float, count: int) -> float:
    return total / count if count else math.nan


def checkpoint_size(model: nn.Module) -> int:
    """About how many bytes: the parameter and two moments, and as if all were masked W, the latent and its moments."""
    return sum(param.numel() for param in model.parameters()) * 4 * 7
