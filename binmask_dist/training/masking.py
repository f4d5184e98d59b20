"""The method that was asked for, around the weights' optimizer."""

from accelerate import Accelerator, DistributedType
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from binmask_dist import MaskedOptimizer, patch
from binmask_dist.baselines import METHODS, Settings, make_method
from binmask_dist.engines.accelerator import SHARDING
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.optimizers import make_optimizer
from binmask_dist.training.tasks.base import RunError

LONG_RUN = 5_000  # steps; next to them the seconds that compiling takes are few, however small the network is


def attach_method(model: nn.Module, config: TrainConfig, accelerator: Accelerator, steps: int) -> MaskedOptimizer:
    """`steps` are those of training, without fine-tuning."""
    check_engine(config.method, accelerator.distributed_type)
    limit = config.clip or None
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if limit and plugin is not None:  # ZeRO clips by itself, before it hands over the first group
        plugin.deepspeed_config["gradient_clipping"] = limit
        limit = None
    has_running_statistics = any(isinstance(module, _BatchNorm) for module in model.modules())
    if plugin is not None and has_running_statistics and accelerator.mixed_precision in ("bf16", "fp16"):
        # DeepSpeed casts parameters alone, and batch normalisation wants its statistics in their precision
        plugin.deepspeed_config.setdefault("data_types", {}).setdefault("buffer_dtype", accelerator.mixed_precision)
    # GPUs have fast forms by themselves; on a CPU torch goes from one small weight to the next
    whole_on_cpu = accelerator.device.type == "cpu" and accelerator.distributed_type not in SHARDING
    optimizer = make_optimizer(model, config, fused=whole_on_cpu)
    try:
        if config.method != "binmask":
            return make_method(config.method, model, optimizer, settings(config, steps, limit))
        return patch(
            model,
            optimizer,
            lam=config.lam,
            epochs=config.epochs,
            targets=config.targets,
            exclude=config.exclude,
            warmup=config.warmup,
            mask_lr=config.mask_lr,
            mask_lr_final=config.mask_lr_final,
            alpha0=config.alpha0,
            max_grad_norm=limit,
            compile=True if steps >= LONG_RUN else None,  # None: by the number of weights
        )
    except (ValueError, TypeError) as error:
        raise RunError(str(error)) from error


def settings(config: TrainConfig, steps: int, max_grad_norm: float | None) -> Settings:
    return Settings(
        epochs=config.epochs,
        steps=steps,
        lam=config.lam,
        target_sparsity=config.target_sparsity,
        seed=config.seed,
        warmup=config.warmup,
        mask_lr=config.mask_lr,
        mask_lr_final=config.mask_lr_final,
        mask_interval=config.mask_interval,
        targets=config.targets,
        exclude=config.exclude,
        max_grad_norm=max_grad_norm,
    )


def check_engine(method: str, engine: DistributedType) -> None:
    """Methods that compare weights, or draw numbers for them, need every weight whole."""
    if engine in SHARDING and method in METHODS and not METHODS[method].sharded:
        raise RunError(
            f"the method {method} needs every weight whole, and {engine.value} cuts them up; "
            "run it on one process or under DDP"
        )
