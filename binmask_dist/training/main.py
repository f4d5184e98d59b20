"""The training job, top to bottom."""

import signal
import warnings

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch.distributed.elastic.multiprocessing.errors import record

from binmask_dist import make_accelerator
from binmask_dist.engines.accelerator import engine_from_environment
from binmask_dist.packed_masks import save_masks
from binmask_dist.training import closing_table, plots
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.environment import environment
from binmask_dist.training.heap import keep_freed_memory
from binmask_dist.training.interruption import end_with_the_launcher
from binmask_dist.training.loop import Interrupted, Loop
from binmask_dist.training.metrics_file import jsonable
from binmask_dist.training.mistakes import made_or_told, told_in_a_sentence, writing
from binmask_dist.training.run_folder import RunFolder
from binmask_dist.training.tasks import make_task
from binmask_dist.training.tasks.base import RunError

# Evaluation takes the main process's running statistics, and training those of the batch: none need travel.
DDP = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)


@record  # so that the launcher shows the error of the process that failed first
def main(config: TrainConfig) -> None:
    # DDP says so of 1x1 convolutions whose images have channels last: it copies their gradients, a few small ones
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    accelerator = made_or_told(lambda: accelerator_for(config))
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    if accelerator.num_processes == 1:
        end_with_the_launcher()
    try:
        with told_in_a_sentence(accelerator):
            train(config, accelerator)
    except Interrupted as interruption:
        accelerator.print(interruption, flush=True)
        raise SystemExit(interruption.exit_code) from None
    except KeyboardInterrupt:
        accelerator.print("interrupted before the first step or after the last; --resume auto goes on", flush=True)
        raise SystemExit(128 + signal.SIGINT) from None
    accelerator.end_training()


def accelerator_for(config: TrainConfig) -> Accelerator:
    return make_accelerator(
        mixed_precision={"": None, "fp32": "no"}.get(config.mixed_precision, config.mixed_precision),
        gradient_accumulation_steps=config.accumulation,
        dynamo_backend="inductor" if config.compile else None,
        dataloader_config=DataLoaderConfiguration(non_blocking=True, dispatch_batches=False),
        kwargs_handlers=[DDP],
    )


def train(config: TrainConfig, accelerator: Accelerator) -> None:
    """Train, save and report, in a new run folder or in the one to be resumed."""
    with accelerator.main_process_first():  # the others find what it has tokenised in the cache of datasets
        task = make_task(config)  # data that cannot be used is found before anything is written
    with RunFolder.open(config, accelerator) as folder:
        if folder.is_finished:
            accelerator.print(f"{folder.path} is finished; its figures are in result.json", flush=True)
            return
        folder.add_environment(environment())
        if config.method == "logistic":
            from binmask_dist.training import logistic  # scikit-learn's models take a while to import

            if accelerator.is_main_process:
                result = jsonable(logistic.fit(task))
                print(f"logistic regression: test AUC {result['test_auc']:.4f}, {folder.path}", flush=True)
                folder.write_json("result.json", result)
            return
        loop = Loop(config, task, folder, accelerator)
        accelerator.print(
            f"{config.model}: {loop.method.plan.total}\n"
            f"{loop.epochs} epochs of {loop.steps_per_epoch} steps, {engine_from_environment()}, "
            f"{closing_table.processes_text(accelerator.num_processes)}; run folder {folder.path}",
            flush=True,
        )
        try:
            loop.run()
            finish(loop, folder)
        except (Interrupted, RunError) as error:
            loop.tracking.finish({}, exit_code=getattr(error, "exit_code", 1))
            raise


def finish(loop: Loop, folder: RunFolder) -> None:
    """Save the model, then report on what the saved files hold."""
    accelerator, config = loop.accelerator, loop.config
    metrics = loop.evaluate()
    masks, layer_sparsity = loop.method.masks(), loop.method.layer_sparsity()
    with writing(f"the model in {folder.path}"):
        files = loop.save_model(folder.path / "model")
        if accelerator.is_main_process:
            save_masks(folder.path / "masks.safetensors", masks)
    if not accelerator.is_main_process:
        return
    result = jsonable(
        {
            "task": config.task,
            "model": config.model,
            "method": config.method,
            **metrics,
            "before_finetuning": loop.position.before_finetuning,
            **closing_table.saved_figures(files, layer_sparsity),
            **closing_table.weight_norms(files, layer_sparsity),
            "seconds": loop.position.seconds,
            "steps": loop.position.step,
            "skipped_steps": loop.skipped_steps,
            "lam": loop.method.masked_groups[0]["lam"],
            "target_sparsity": config.target_sparsity,
            "engine": engine_from_environment(),
            "mixed_precision": accelerator.mixed_precision,
            "processes": accelerator.num_processes,
        }
    )
    with writing(f"the plots in {folder.path}"):
        plots.draw(folder.path)
    print(closing_table.table(result, folder.path), flush=True)
    folder.write_json("result.json", result)  # a run that has it is finished
    loop.tracking.finish(result)
