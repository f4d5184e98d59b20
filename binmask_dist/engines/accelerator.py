"""`make_accelerator`: the Accelerator that was asked for, on any host, or an error.

On a host without a GPU Accelerate falls back without a word: to one process, to two that do not talk, or from ZeRO and
FSDP2 to DDP. The order of the calls below avoids that, and what runs is compared with what was asked for at the end.
So every engine can be rehearsed for real on two CPU cores.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

from binmask_dist.method.wrapper import MaskedOptimizer, innermost

ENGINES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
SHARDING = (DistributedType.DEEPSPEED, DistributedType.FSDP)


class EngineError(RuntimeError):
    """What was asked for does not run here; the text says what does, and what to do."""


class BinMaskAccelerator(Accelerator):
    """An Accelerator whose `prepare` makes sure that the masks are still in charge afterwards."""

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        if self.distributed_type == DistributedType.DEEPSPEED:
            check_deepspeed_config(self.state.deepspeed_plugin.deepspeed_config)
        prepared = super().prepare(*args, **kwargs)
        results = prepared if isinstance(prepared, tuple | list) else (prepared,)
        for given, result in zip(args, results, strict=True):
            if isinstance(given, MaskedOptimizer):
                check_in_charge(given, result)
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        if self.distributed_type == DistributedType.DEEPSPEED:
            clips_at = self.state.deepspeed_plugin.deepspeed_config["gradient_clipping"]
            if float(max_norm) != float(clips_at):
                raise ValueError(
                    f"DeepSpeed clips by itself, before this call: set gradient_clipping to {max_norm} in its config "
                    f"(now {clips_at}; 0 is none)"
                )
        return super().clip_grad_norm_(parameters, max_norm, norm_type)


def make_accelerator(engine: str = "auto", *, mixed_precision: str | None = None, **kwargs: Any) -> Accelerator:
    """An Accelerator for one of ENGINES; "auto" is what `accelerate launch` was configured for, precision included.

    Further arguments go to `accelerate.Accelerator`, `deepspeed_plugin` and `fsdp_plugin` among them. Raises if the
    engine, its ZeRO stage, the precision or the number of processes is not what was asked for.
    """
    asked = engine_from_environment() if engine == "auto" else engine
    if asked not in ENGINES:
        raise ValueError(f"engine must be auto or one of {', '.join(ENGINES)}, not {engine!r}")
    mixed_precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    on_cpu = not torch.accelerator.is_available() or _flag("ACCELERATE_USE_CPU")
    zero = asked.startswith("zero")
    if zero:
        plugin = kwargs.get("deepspeed_plugin") or _deepspeed_plugin(int(asked[-1]), kwargs)
        kwargs["deepspeed_plugin"] = plugin
        _adjust(plugin.deepspeed_config)
        check_deepspeed_config(plugin.deepspeed_config)
    if asked == "fsdp2":
        kwargs["fsdp_plugin"] = kwargs.get("fsdp_plugin") or _fsdp_plugin()
    environment = {"ACCELERATE_USE_DEEPSPEED": str(zero).lower()}
    environment["ACCELERATE_USE_FSDP"] = str(asked == "fsdp2").lower()
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would search for a GPU, and warn
    if on_cpu and asked not in ("single", "ddp"):
        environment["ACCELERATE_USE_CPU"] = "false"  # it would switch the engine off; the state below is on the CPU
    with _set(environment):
        if on_cpu:
            state = PartialState(cpu=True)
            if asked == "fsdp2" and state.num_processes > 1:
                state.distributed_type = DistributedType.MULTI_GPU  # the only kind that Accelerate shards for
        accelerator = BinMaskAccelerator(
            cpu=on_cpu and asked in ("single", "ddp"), mixed_precision=mixed_precision, **kwargs
        )
    _check_what_runs(accelerator, asked)
    _check_precision(accelerator)
    return accelerator


def engine_from_environment() -> str:
    """What `accelerate launch` asks of this process, from the variables that it sets."""
    if _flag("ACCELERATE_USE_DEEPSPEED"):  # with its own JSON file, no variable has the stage
        return f"zero{DeepSpeedPlugin().zero_stage}"
    if _flag("ACCELERATE_USE_FSDP"):
        version = os.environ.get("FSDP_VERSION", "1")
        if version != "2":
            raise ValueError("FSDP1 flattens parameters over layers; set fsdp_version: 2 in the Accelerate config")
        return "fsdp2"
    return "ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "single"


def check_in_charge(binmask: MaskedOptimizer, prepared: Any) -> None:
    """Raise unless the optimizer that an engine wrapped or made is, at its core, this one."""
    inside = innermost(prepared)
    if inside is not binmask:
        raise RuntimeError(
            f"the engine replaced BinMask by {type(inside).__name__}; with optimizer offload set "
            "zero_force_ds_cpu_optimizer to false in the DeepSpeed config"
        )


def check_deepspeed_config(config: dict[str, Any]) -> None:
    elastic = config.get("zero_optimization", {}).get("elastic_checkpoint", False)
    if elastic or config.get("checkpoint", {}).get("load_universal", False):
        kind = "elastic_checkpoint" if elastic else "load_universal"
        raise ValueError(
            f"DeepSpeed's {kind} keeps only Adam's moments and would lose the masks; switch it off and use "
            "binmask_dist.save_checkpoint to change the engine or the number of processes"
        )


def _deepspeed_plugin(stage: int, kwargs: dict[str, Any]) -> DeepSpeedPlugin:
    if _flag("ACCELERATE_USE_DEEPSPEED"):
        return DeepSpeedPlugin()  # from the launcher's variables
    return DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": kwargs.get("gradient_accumulation_steps", 1),
            "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        }
    )


def _adjust(config: dict[str, Any]) -> None:
    """What BinMask needs of DeepSpeed, where the config does not say otherwise."""
    config["zero_allow_untested_optimizer"] = True
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    if config.get("gradient_clipping", "auto") == "auto":
        config["gradient_clipping"] = 0.0  # Accelerate and DeepSpeed would both make it 1.0


def _fsdp_plugin() -> FullyShardedDataParallelPlugin:
    if _flag("ACCELERATE_USE_FSDP"):
        return FullyShardedDataParallelPlugin()  # from the launcher's variables
    return FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)


def _check_what_runs(accelerator: Accelerator, asked: str) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world:
        raise EngineError(
            f"{world} processes were started but this one runs alone ({accelerator.distributed_type}); "
            "make the Accelerator with binmask_dist.make_accelerator before anything else touches accelerate"
        )
    runs = _running_engine(accelerator)
    if runs != asked:
        hint = (
            "start it with accelerate launch --config_file configs/accelerate/cpu2.yaml"
            if world == 1
            else "make the Accelerator before anything else touches accelerate"
        )
        raise EngineError(f"asked for {asked}, but {runs} runs on {world} process(es); {hint}")


def _check_precision(accelerator: Accelerator) -> None:
    """Accelerate keeps the word and computes in fp32 where the device cannot do it: fp16 on a CPU."""
    precision, device = accelerator.mixed_precision, accelerator.device.type
    by_engine = accelerator.distributed_type in SHARDING
    if precision != "no" and not (accelerator.native_amp or by_engine):
        raise EngineError(f"mixed_precision {precision} does not run on this {device}: take bf16, or leave it out")


def _running_engine(accelerator: Accelerator) -> str:
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    if kind == DistributedType.FSDP:
        return f"fsdp{accelerator.state.fsdp_plugin.fsdp_version}"
    return "single" if accelerator.num_processes == 1 else "ddp"


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1")


@contextmanager
def _set(environment: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
