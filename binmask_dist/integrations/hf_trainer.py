"""`BinMaskCallback`: BinMask in the transformers Trainer, with one more line.

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    callback = BinMaskCallback(lam=1e-6).attach(trainer)
    trainer.train()
    print(callback.binmask.sparsity())

The Trainer makes its optimizer when training starts, before it prepares the model and makes the scheduler. That is
where masks must come in, and no callback is called there: `attach` puts itself in front of `trainer.create_optimizer`.
It does the same with `trainer.log`, because what a callback adds in `on_log` comes after the history was written.

The masks are in the optimizer's state, so the Trainer's own checkpoints have them. Their rate follows from the number
of the step, so a resumed run needs nothing else.
"""

import inspect
import sys
from typing import Any, Self

from accelerate import DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import parse_flag_from_env
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from binmask_dist.engines.accelerator import SHARDING, check_deepspeed_config, check_in_charge
from binmask_dist.method import readout
from binmask_dist.method.layout import placements
from binmask_dist.method.optimizer import BinMask
from binmask_dist.method.patch import patch

# A checkpoint brings these back as they were when it was written. What counts is what this run was told.
SETTINGS = (
    *("lam", "warmup", "mask_lr_initial", "mask_lr_final", "mask_betas", "mask_eps", "alpha1"),
    *("max_grad_norm", "check_finite", "compile"),
)


class BinMaskCallback(TrainerCallback):
    """Masks, their rates, their records in the Trainer's logs, and checks that no checkpoint or engine loses them."""

    def __init__(
        self, *, lam: float, epochs: int | None = None, freeze_epochs: int = 0, log_layers: bool = True, **options: Any
    ) -> None:
        """
        lam            penalty for each weight that is on
        epochs         E of Algorithm 1; None: the Trainer's own. Any other number cuts the steps into so many equal
                       parts, for training that takes few epochs or knows none
        freeze_epochs  the last of the epochs, in which masks are fixed and only weights are fine-tuned
        log_layers     log the sparsity of every masked weight beside the overall one
        options        further arguments of binmask_dist.patch: targets, exclude, mask_lr, warmup, ...
        """
        if epochs is not None:
            _check_epochs(epochs, freeze_epochs)
        # a misspelt one is found here, and not when the Trainer has loaded everything
        inspect.signature(patch).bind(None, None, lam=lam, epochs=epochs, **options)
        self.options = {"lam": lam, **options}
        self.epochs = epochs
        self.freeze_epochs = freeze_epochs
        self.log_layers = log_layers
        self._trainer: Trainer | None = None
        self._binmask: BinMask | None = None
        self._settings: list[dict[str, Any]] = []  # of each masked group
        self._epochs_now = 1  # `epochs`, or the Trainer's

    @property
    def binmask(self) -> BinMask:
        """Made when training starts. What it reports is collective: every rank calls."""
        if self._binmask is None:
            raise RuntimeError("the masks are made when training starts: call attach(trainer), then trainer.train()")
        return self._binmask

    def attach(self, trainer: Trainer) -> Self:
        """Let this Trainer train with masks; to be called between `Trainer(...)` and `trainer.train()`."""
        _check_can_be_masked(trainer, self)
        _check_arguments(trainer.args, self.options)
        _check_engine(trainer)
        self._trainer = trainer
        create_optimizer, log = trainer.create_optimizer, trainer.log

        def create_masked_optimizer(model: Any = None) -> Optimizer:
            return self._patch(trainer, create_optimizer(model))

        def log_with_masks(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            # The Trainer's own records of training: on every rank, which evaluation and users' records may not be.
            if "loss" in logs or "train_loss" in logs:
                logs.update(self.record())
            log(logs, *args, **kwargs)

        vars(trainer).update(create_optimizer=create_masked_optimizer, log=log_with_masks)  # of this Trainer alone
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def record(self) -> dict[str, float]:
        """What is logged; flips are counted since the start. Collective."""
        binmask = self.binmask
        counts = readout.zeros_and_sizes(binmask)
        zeros, sizes = zip(*counts.values(), strict=True)
        flips = binmask.flips()
        record = {
            "sparsity": sum(zeros) / sum(sizes),
            "flips_on_to_off": flips.on_to_off,
            "flips_off_to_on": flips.off_to_on,
            "mask_lr": binmask.mask_lr,
        }
        if self.log_layers:
            record |= {f"layer_sparsity/{name}": off / size for name, (off, size) in counts.items()}
        return record

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._trainer is None:
            raise RuntimeError(
                "BinMaskCallback cannot work from the Trainer's list of callbacks alone: "
                "call callback.attach(trainer) before trainer.train()"
            )
        check_in_charge(self.binmask, kwargs["optimizer"])
        if state.global_step > 0 and not _has_masks(self.binmask):
            raise RuntimeError(
                "the checkpoint has no masks: it was saved without the optimizer's state (save_only_model) or by "
                "training without BinMask; resume from another one, or start anew from its weights with from_zeros=True"
            )
        if self.epochs is None and state.num_train_epochs == sys.maxsize:
            raise ValueError("the training data has no length and so no epochs: give BinMaskCallback(epochs=...)")
        self._epochs_now = self.epochs or state.num_train_epochs
        _check_epochs(self._epochs_now, self.freeze_epochs)
        for group, settings in zip(self.binmask.masked_groups, self._settings, strict=True):
            group.update(settings, epochs=self._epochs_now - self.freeze_epochs)
        if self.freeze_epochs and state.global_step > 0:  # which are the last epochs now, `on_step_begin` knows
            self.binmask.unfreeze()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        epoch = state.global_step * self._epochs_now // state.max_steps
        self.binmask.set_epoch(epoch)
        if epoch >= self._epochs_now - self.freeze_epochs:
            self.binmask.freeze()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self._trainer is not None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # The Trainer went back to the weights of the best model, and the masks would still be the last ones.
            self._trainer._load_optimizer_and_scheduler(state.best_model_checkpoint)

    def _patch(self, trainer: Trainer, optimizer: Optimizer) -> Optimizer:
        """Called whenever the Trainer wants its optimizer: the first time it is an ordinary one."""
        inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if self._binmask is not None and inner is self._binmask:
            return optimizer
        if self._binmask is not None and self._binmask.model is trainer.model:
            raise RuntimeError(
                "the Trainer has made a new optimizer for a model that is masked already, and the masks would be lost "
                "(DeepSpeed does so when train() is called again); make a new Trainer and use resume_from_checkpoint"
            )
        assert trainer.model is not None
        _forget_evaluation(trainer)
        # the Trainer may not have counted its epochs yet: `on_train_begin` sets them
        self._binmask = patch(trainer.model, optimizer, epochs=1, **self.options)
        self._settings = [{key: group[key] for key in SETTINGS} for group in self._binmask.masked_groups]
        trainer.optimizer = self._binmask
        return self._binmask


def _forget_evaluation(trainer: Trainer) -> None:
    """`evaluate` before `train` leaves a model that Accelerate takes for prepared, and would not wrap for DDP again.

    Then every rank would train by its own gradients, and learn masks of its own.
    """
    model, accelerator = trainer.model, trainer.accelerator
    if trainer.model_wrapped is model and accelerator.distributed_type not in SHARDING:
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # it would be wrapped in a second one
        accelerator._models.clear()
        vars(model).pop("_is_accelerate_prepared", None)


def _has_masks(binmask: BinMask) -> bool:
    where = placements(binmask.masked_groups, binmask.model)
    holders = [place.holder for place in where.values() if place.holder is not None]
    return not holders or any("latent" in binmask.state.get(holder, {}) for holder in holders)


def _check_epochs(epochs: int, freeze_epochs: int) -> None:
    if epochs < 1 or not 0 <= freeze_epochs < epochs:
        raise ValueError(
            f"masks cannot learn in {epochs} epochs of which the last {freeze_epochs} are frozen: "
            "freeze_epochs must be 0 or more, and fewer than the epochs"
        )


def _check_can_be_masked(trainer: Trainer, callback: BinMaskCallback) -> None:
    attached = [other for other in trainer.callback_handler.callbacks if isinstance(other, BinMaskCallback)]
    if callback._trainer is not None or any(other is not callback for other in attached):
        raise RuntimeError("attach one BinMaskCallback to one Trainer, once")
    if trainer.is_in_train:
        raise RuntimeError("training has started: call attach between Trainer(...) and trainer.train()")
    if isinstance(trainer.optimizer, AcceleratedOptimizer):
        raise RuntimeError("this Trainer has trained without masks already; attach to a new one")
    if trainer.lr_scheduler is not None:
        raise ValueError(
            "masks split the optimizer's groups, and a scheduler that was made before does not follow them: "
            "give the Trainer optimizers=(optimizer, None), and lr_scheduler_type in its arguments"
        )


def _check_arguments(args: TrainingArguments, options: dict[str, Any]) -> None:
    if options.get("max_grad_norm") is not None and args.max_grad_norm > 0:
        raise ValueError(
            f"both would clip: the Trainer by the norm of g (max_grad_norm={args.max_grad_norm}, 1.0 unless told "
            "otherwise), BinMask by that of g_W; set max_grad_norm=0 in TrainingArguments, or leave it out of "
            "BinMaskCallback"
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise ValueError(
            "save_only_model leaves the masks out of the checkpoints, and load_best_model_at_end must go back to them; "
            "use one of the two"
        )


def _check_engine(trainer: Trainer) -> None:
    args, accelerator = trainer.args, trainer.accelerator
    asked = {
        DistributedType.DEEPSPEED: bool(args.deepspeed) or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"),
        DistributedType.FSDP: bool(args.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP"),
    }
    for kind, wanted in asked.items():
        if wanted and accelerator.distributed_type != kind:
            raise RuntimeError(f"asked for {kind.value}, but {accelerator.distributed_type.value} runs on this host")
    if asked[DistributedType.FSDP] and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise ValueError("FSDP1 flattens parameters over layers; ask for FSDP2: fsdp_config={'version': 2}")
    if asked[DistributedType.DEEPSPEED]:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        check_deepspeed_config(config)
        if "optimizer" in config:
            raise ValueError(
                "DeepSpeed would make an optimizer without masks: take 'optimizer' out of its config and choose one "
                "with TrainingArguments(optim=...)"
            )
