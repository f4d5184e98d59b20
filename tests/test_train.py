"""The training job, through its real command line and in this process."""

import json
from pathlib import Path

import pytest
import timm
import torch
from accelerate.state import AcceleratorState
from jobs import SHORT, options, records, result, run, train_here
from safetensors.torch import load_file
from sklearn.datasets import load_breast_cancer

from binmask_dist.packed_masks import load_masks
from binmask_dist.training import closing_table
from binmask_dist.training.averaging import Average
from binmask_dist.training.config import TrainConfig, parse_config
from binmask_dist.training.data import digits
from binmask_dist.training.loading import EpochSampler
from binmask_dist.training.main import main
from binmask_dist.training.optimizers import learning_rate, make_optimizer
from binmask_dist.training.tasks import make_task
from binmask_dist.training.tasks.base import RunError

EPOCHS = SHORT["epochs"]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("runs")
    done = run(*options(run_root=root, name="short", **SHORT), config="cpu2")
    assert done.returncode == 0, done.stderr
    return root / "short", done.stdout


@pytest.mark.slow
def test_the_job_without_arguments_is_sparse_and_accurate(tmp_path: Path) -> None:
    """That of `make train`, but for where its folder lies."""
    done = run(f"--run_root={tmp_path}", config="cpu2")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    figures = result(folder)
    assert figures["test_accuracy"] > 0.985
    assert figures["sparsity"] >= 0.95
    assert f"{100 * figures['test_accuracy']:.2f}%" in done.stdout and str(folder) in done.stdout


def test_the_run_folder_is_complete(two_processes: tuple[Path, str]) -> None:
    folder, _ = two_processes
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "environment.json", "metrics.jsonl", "checkpoints", "model", "result.json"}
    assert "masks.safetensors" in names
    config = json.loads((folder / "config.json").read_text())
    assert (config["epochs"], config["lam"], config["seed"]) == (EPOCHS, 1e-5, 0)
    plots = list(folder.glob("*.png"))
    assert len(plots) >= 3
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    assert "torch" in json.dumps(json.loads((folder / "environment.json").read_text()))


def test_the_records_of_epochs(two_processes: tuple[Path, str]) -> None:
    folder, _ = two_processes
    epochs = records(folder)
    assert [record["epoch"] for record in epochs] == list(range(EPOCHS))
    waiting, first, last = epochs
    assert waiting["sparsity"] == waiting["mask_lr"] == waiting["on_to_off"] == 0
    assert first["mask_lr"] == TrainConfig.mask_lr
    assert last["mask_lr"] == pytest.approx(TrainConfig.mask_lr_final)
    assert first["on_to_off"] > 1000
    assert last["sparsity"] > 0.5
    assert last["train_loss"] < waiting["train_loss"]
    assert 0.2 < waiting["train_accuracy"] < last["train_accuracy"] <= 1
    net = sum(record["on_to_off"] - record["off_to_on"] for record in epochs)
    assert net == round(last["sparsity"] * result(folder)["masked_weights"])
    assert sum(last["latent_histogram"]["counts"]) == result(folder)["masked_weights"]


def test_the_records_of_steps(two_processes: tuple[Path, str]) -> None:
    folder, _ = two_processes
    steps = records(folder, "step")
    assert [record["step"] for record in steps] == [10, 20, 30, 40, 50, 60]
    assert all(record["examples_per_second"] > 0 for record in steps)
    assert steps[0]["lr"] == pytest.approx(learning_rate(TrainConfig(**SHORT), 9 / 22))
    assert (steps[0]["mask_lr"], steps[-1]["mask_lr"]) == (0.0, pytest.approx(TrainConfig.mask_lr_final))


def test_the_saved_model_is_what_was_reported(two_processes: tuple[Path, str]) -> None:
    """In a stock timm model, on one process, which counts every test image once."""
    folder, _ = two_processes
    reported = result(folder)
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    model.load_state_dict(load_file(folder / "model" / "model.safetensors"))
    images, labels = zip(*make_task(TrainConfig()).test, strict=True)
    with torch.no_grad():
        correct = int((model.eval()(torch.stack(images)).argmax(dim=1) == torch.tensor(labels)).sum())
    assert (correct, len(labels)) == (reported["test_correct"], reported["test_examples"])
    weights = dict(model.named_parameters())
    masks = load_masks(folder / "masks.safetensors")
    assert masks.keys() == reported["layer_sparsity"].keys()
    assert all(not weights[name][~mask].any() for name, mask in masks.items())
    assert sum(int(mask.sum()) for mask in masks.values()) == reported["weights_left"]
    assert (reported["processes"], reported["engine"]) == (2, "ddp")


def test_the_closing_table_says_what_got_smaller(two_processes: tuple[Path, str]) -> None:
    folder, output = two_processes
    reported = result(folder)
    assert output.count("epoch ") == EPOCHS  # one line each, from one process
    assert f"{reported['test_accuracy']:.2%}" in output
    assert f"{reported['sparsity']:.2%}" in output
    assert "no smaller than dense" in output
    assert "no faster than dense" in output
    assert all(name in output for name in reported["layer_sparsity"])


def test_one_process_takes_the_same_steps_as_two(two_processes: tuple[Path, str], tmp_path: Path) -> None:
    """Batch norm sees other batches, so that only the data can be compared: the same examples in every step."""
    alone = train_here(tmp_path, "alone")
    ours, theirs = records(alone, "step"), records(two_processes[0], "step")
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    assert records(alone)[0]["train_loss"] == pytest.approx(records(two_processes[0])[0]["train_loss"], rel=0.1)
    assert records(alone)[-1]["test_examples"] == 360


def test_the_order_of_the_data_depends_on_seed_and_epoch_alone() -> None:
    def order(epoch: int, start: int = 0, seed: int = 0) -> list[int]:
        sampler = EpochSampler(100, 96, seed)
        sampler.set_position(epoch, start)
        return list(sampler)

    assert order(0) == order(0)
    assert len(order(0)) == len(set(order(0))) == 96
    assert order(3, start=32) == order(3)[32:]
    assert len({tuple(order(epoch, seed=seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_fine_tuning_keeps_the_masks_and_is_reported_before_and_after(tmp_path: Path) -> None:
    folder = train_here(tmp_path, "tuned", finetune_epochs=2)
    epochs = records(folder)
    assert [record["phase"] for record in epochs] == ["train"] * 3 + ["fine-tune"] * 2
    assert all(record["frozen"] and record["on_to_off"] == record["off_to_on"] == 0 for record in epochs[3:])
    assert len({record["sparsity"] for record in epochs[2:]}) == 1
    reported = result(folder)
    assert reported["before_finetuning"]["test_accuracy"] == epochs[2]["test_accuracy"]
    assert reported["test_accuracy"] == epochs[-1]["test_accuracy"]
    assert reported["sparsity"] == pytest.approx(epochs[2]["sparsity"])


def test_accumulation_and_clipping_change_no_more_than_they_should(tmp_path: Path) -> None:
    """A network without batch norm: parts of a batch then have the gradient of the whole."""
    common = dict(model="test_vit", image_size=32, model_args={"img_size": 32}, epochs=1, warmup=0.0, lr=0.01)
    whole = train_here(tmp_path, "whole", **common)
    parts = train_here(tmp_path, "parts", accumulation=4, **common)
    for key in ("train_loss", "train_accuracy"):
        assert records(parts)[0][key] == pytest.approx(records(whole)[0][key], rel=1e-3)
    clipped = train_here(tmp_path, "clipped", clip=1e-3, **common)
    assert all(record["grad_norm"] > 1e-3 for record in records(clipped, "step"))
    assert records(clipped)[0]["train_loss"] > records(whole)[0]["train_loss"]


def test_an_average_is_evaluated_and_saved_with_the_masks(tmp_path: Path) -> None:
    folder = train_here(tmp_path, "average", ema_decay=0.9)
    plain = train_here(tmp_path, "plain")
    assert records(folder)[-1]["sparsity"] == records(plain)[-1]["sparsity"]  # the training itself is the same
    average, weights = (load_file(run / "model" / "model.safetensors") for run in (folder, plain))
    masks = load_masks(folder / "masks.safetensors")
    assert all(not average[name][~mask].any() for name, mask in masks.items())
    assert any(not torch.equal(average[name], weights[name]) for name in masks)


def test_an_average_of_bf16_weights_moves() -> None:
    """1,000 steps of a thousandth: bf16 would round nearly all of them away."""
    model = torch.nn.Linear(50, 50, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    average = Average(model, 0.999)
    torch.nn.init.constant_(model.weight, 2.0)
    for _ in range(1000):
        average.update()
    torch.testing.assert_close(average.averages["weight"], torch.full((50, 50), 2 - 0.999**1000))


def test_a_precision_that_would_not_run_gets_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("fp16 runs on this device")
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(SystemExit) as left:
        main(TrainConfig(mixed_precision="fp16"))
    assert left.value.code == 1
    assert (
        capsys.readouterr().err == "error: mixed_precision fp16 does not run on this cpu: take bf16, or leave it out\n"
    )


def test_bf16(tmp_path: Path) -> None:
    """Autocast is on in the passes, and the weights that are saved stay fp32."""
    small = dict(model="mlp_bn", epochs=1)  # convolutions in bf16 take minutes on some processors
    folder = train_here(tmp_path, "bf16", mixed_precision="bf16", **small)
    plain = train_here(tmp_path, "plain", **small)
    assert result(folder)["mixed_precision"] == "bf16"
    ours, theirs = records(folder)[0]["train_loss"], records(plain)[0]["train_loss"]
    assert ours != theirs and ours == pytest.approx(theirs, rel=0.05)
    assert torch.bfloat16 not in {tensor.dtype for tensor in load_file(folder / "model" / "model.safetensors").values()}


def test_early_stopping_keeps_the_best_epoch(tmp_path: Path) -> None:
    """A rate that is far too high: accuracy falls at some time, and the best epoch is what is saved."""
    folder = train_here(tmp_path, "stopped", epochs=12, lr=1.5, momentum=0.95, patience=2, schedule="constant")
    accuracies = [record["test_accuracy"] for record in records(folder)]
    assert len(accuracies) < 12
    assert result(folder)["test_accuracy"] == max(accuracies)
    assert max(accuracies[-2:]) <= max(accuracies)
    with pytest.raises(RunError, match="metric 'auc' is not measured here; there is accuracy, loss"):
        train_here(tmp_path, "auc", epochs=1, patience=1, metric="auc")


def test_a_nan_stops_the_run_or_is_skipped(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the loss is NaN or inf at step .*; there is no checkpoint yet: start anew"):
        train_here(tmp_path, "stop", lr=1e20)
    with pytest.raises(RunError, match=r"the loss is NaN or inf at step .*; the last good checkpoint is kept"):
        train_here(tmp_path, "kept", lr=1e20, checkpoint_every=1)
    # the only step of an epoch: its loss is finite, and what it leaves is not
    with pytest.raises(RunError, match=r"the test loss is NaN or inf at step 1; there is no checkpoint yet"):
        train_here(tmp_path, "last", lr=1e20, steps_per_epoch=1)
    assert not list((tmp_path / "last").glob("checkpoints/*"))
    with pytest.warns(UserWarning, match="a gradient is NaN or inf"):
        folder = train_here(tmp_path, "skip", lr=1e20, on_nan="skip", epochs=1)
    assert result(folder)["skipped_steps"] > 0
    assert records(folder)[0]["train_loss"] > 1  # of the steps that have one
    assert records(folder, "step")[-1]["loss"] is None
    assert all(tensor.isfinite().all() for tensor in load_file(folder / "model" / "model.safetensors").values())


def test_an_image_that_a_worker_cannot_read_ends_the_job_with_one_sentence(tmp_path: Path) -> None:
    splits = digits()
    for name, count in (("train", 40), ("test", 20)):
        for index, row in enumerate(splits[name].select(range(count))):
            path = tmp_path / "images" / name / str(row["label"]) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            row["image"].save(path)
    broken = min((tmp_path / "images" / "train").glob("*/*.png"))
    broken.write_bytes(b"no image")
    values = dict(dataset=tmp_path / "images", augment="flip", workers=1, batch_size=20, **SHORT)
    done = run(*options(run_root=tmp_path, name="broken", **values))
    assert done.returncode == 1
    told = f"error: {broken}, in the column 'image', cannot be read: cannot identify image file"
    assert [line[: len(told)] for line in done.stderr.splitlines() if "rror" in line] == [told], done.stderr
    assert "Traceback" not in done.stderr


SLOW_MASKS = dict(model="mlp_bn", mask_lr=1e-3, epochs=30)  # most are still on after half of the run


# 70% of the default network's weights never get a gradient on such small images, and go off together under any penalty
@pytest.mark.parametrize(
    ("target", "values"),
    [(0.9, dict(epochs=10)), (0.5, dict(epochs=10)), (0.5, SLOW_MASKS)],
    ids=["fast", "below the weights without a gradient", "slow"],
)
def test_steering_ends_at_the_sparsity_that_was_asked_for(tmp_path: Path, target: float, values: dict) -> None:
    folder = train_here(tmp_path, "steered", **{"warmup": 0.1, "target_sparsity": target, **values})
    assert abs(result(folder)["sparsity"] - target) <= 0.005
    assert closing_table.table(result(folder), folder).count(f"{target:.2%}, met") == 1
    assert "90.00%, MISSED" in closing_table.table({**result(folder), "target_sparsity": 0.9, "sparsity": 0.88}, folder)
    assert result(folder)["test_accuracy"] > 0.95
    assert len({record["lam"] for record in records(folder, "step")}) > 1


def test_a_table_with_a_compiled_model(tmp_path: Path) -> None:
    """The smallest network there is: compiling takes seconds."""
    table = load_breast_cancer(as_frame=True).frame
    table.to_csv(tmp_path / "table.csv", index=False)
    common = dict(task="tabular", dataset=str(tmp_path / "table.csv"), model="mlp_tanh", optimizer="adamw", lr=0.02)
    folder = train_here(tmp_path, "compiled", compile=True, **common)
    plain = train_here(tmp_path, "plain", **common)
    assert result(folder)["test_auc"] > 0.98
    assert result(folder)["test_loss"] == pytest.approx(result(plain)["test_loss"], rel=1e-3)
    names = load_file(folder / "model" / "model.safetensors").keys()
    assert names == load_file(plain / "model" / "model.safetensors").keys()  # those of the model itself


def test_a_table_that_is_streamed_to_two_processes(tmp_path: Path) -> None:
    rows = load_breast_cancer(as_frame=True).frame.sample(frac=1, random_state=0)
    rows[:450].to_csv(tmp_path / "train.csv")
    rows[450:].to_csv(tmp_path / "test.csv")
    values = dict(task="tabular", dataset=str(tmp_path / "train.csv"), test_split=str(tmp_path / "test.csv"))
    values |= dict(streaming=True, steps_per_epoch=14, batch_size=32, workers=1)
    values |= dict(model="mlp_tanh", optimizer="adamw", lr=0.02)
    done = run(*options(run_root=tmp_path, name="streamed", **SHORT, **values), config="cpu2")
    assert done.returncode == 0, done.stderr
    reported = result(tmp_path / "streamed")
    assert (reported["processes"], reported["test_examples"]) == (2, len(rows) - 450)
    assert reported["test_auc"] > 0.98


def test_shards(tmp_path: Path) -> None:
    """With all that writes to parameters behind the engine's back: an average, and the best epoch loaded at the end."""
    engine = "fsdp2"
    values = {**SHORT, "epochs": 2, "warmup": 0.0, "ema_decay": 0.9, "accumulation": 2, "clip": 1.0, "patience": 5}
    done = run(*options(run_root=tmp_path, name=engine, **values), config=engine)
    assert done.returncode == 0, done.stderr
    reported = result(tmp_path / engine)
    assert reported["engine"] == engine
    assert reported["sparsity"] > 0.3  # counted in the file, which has the average
    best = max(records(tmp_path / engine), key=lambda record: record["test_accuracy"])
    assert reported["test_loss"] == pytest.approx(best["test_loss"], rel=1e-5)


def test_learning_rate() -> None:
    config = TrainConfig(epochs=10, lr=0.1, lr_final=0.02, lr_warmup_epochs=2, finetune_epochs=4, finetune_lr=0.01)
    assert [learning_rate(config, epoch) for epoch in (0, 1, 2)] == [0, 0.05, 0.1]
    assert learning_rate(config, 6) == pytest.approx(0.06)
    assert learning_rate(config, 9.9999999) == pytest.approx(0.02)
    assert learning_rate(config, 10) == 0.01
    assert learning_rate(config, 12) == pytest.approx(0.005)
    constant = TrainConfig(epochs=10, lr=0.1, schedule="constant")
    assert {learning_rate(constant, epoch) for epoch in (0, 3, 9.5)} == {0.1}


@pytest.mark.parametrize(("name", "kind"), [("sgd", "SGD"), ("SGD", "SGD"), ("adamw", "AdamW"), ("lion", "Lion")])
def test_optimizers_by_name(name: str, kind: str) -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    optimizer = make_optimizer(model, TrainConfig(optimizer=name, weight_decay=0.1))
    assert type(optimizer).__name__ == kind
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for p in model.parameters() if p.ndim > 1}


@pytest.mark.parametrize(
    ("name", "arguments", "fused"),
    [
        ("sgd", {}, True),
        ("AdamW", {}, True),
        ("lion", {}, None),
        ("RMSprop", {}, None),
        ("Adam", {"foreach": True}, None),
    ],
)
def test_optimizers_are_fused_where_there_is_such_a_form(name: str, arguments: dict, fused: bool | None) -> None:
    model = torch.nn.Linear(2, 3)
    config = TrainConfig(optimizer=name, optimizer_args=arguments)
    assert make_optimizer(model, config, fused=True).param_groups[0].get("fused") is fused
    assert not make_optimizer(model, config).param_groups[0].get("fused")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"optimizer": "adamv"}, "no optimizer is called 'adamv'; did you mean"),
        ({"optimizer_args": {"speed": 3}}, "optimizer_args: the optimizer 'sgd' takes no 'speed'"),
        ({"optimizer_args": {"nestrov": True}}, "takes no 'nestrov'; did you mean 'nesterov'?"),
        ({"optimizer": "AdamW", "optimizer_args": {"beta": 0.9}}, "takes no 'beta'; did you mean 'betas'?"),
        ({"optimizer": "AdamW", "optimizer_args": {"eps": -1.0}}, "the optimizer 'AdamW' cannot be made"),
        (
            {"optimizer": "AdamW", "optimizer_args": {"betas": [0.9]}},
            "cannot be made with optimizer_args {'betas': [0.9]}",
        ),
        ({"optimizer": "adahessian"}, "the optimizer 'adahessian' needs second derivatives"),
        pytest.param(
            {"optimizer": "fusedadam"},
            "the optimizer 'fusedadam' cannot be made: CUDA required",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it lacks something else"),
        ),
        (
            {"optimizer": "AdamW", "optimizer_args": {"weight_decay": 0.1}},
            "weight_decay is a key of its own; give it as",
        ),
        ({"optimizer": "SparseAdam"}, "no optimizer is called 'SparseAdam'"),
        ({"targets": "nothing_matches"}, "nothing_matches"),
        ({"targets": "("}, "is not a valid regular expression"),
        ({"model": "resnet8"}, "resnet8"),
        ({"batch_size": 2000}, "batch_size 2000 is more than the 1437 examples there are"),
        ({"batch_size": 63, "accumulation": 2}, "batch_size 63 cannot be shared equally"),
    ],
)
def test_bad_values_get_one_sentence(tmp_path: Path, values: dict, text: str) -> None:
    with pytest.raises(RunError) as error:
        train_here(tmp_path, "bad", **values)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_does_not_take_the_name_of_a_run(tmp_path: Path) -> None:
    for mistake in ({"optimizer": "adamww"}, {"targets": "nothing_matches", "resume": "auto"}):
        with pytest.raises(RunError):
            train_here(tmp_path, "again", **mistake)
    folder = train_here(tmp_path, "again", epochs=1, optimizer="adamw")
    assert json.loads((folder / "config.json").read_text())["optimizer"] == "adamw"
    with pytest.raises(RunError, match="again holds a run already; give another --name, or --resume"):
        train_here(tmp_path, "again", epochs=1, optimizer="adamw")


def test_a_misspelt_key_names_the_nearest() -> None:
    done = run("--maks_lr=3e-2")
    assert done.returncode == 2
    assert done.stderr == "launch/train.py: error: unknown key 'maks_lr': did you mean 'mask_lr'?\n"


def parse_error(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        parse_config(args)
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--lamb=1e-6"], "unknown key 'lamb': did you mean 'lam'?"),
        (["--epoch", "3"], "unknown key 'epoch': did you mean 'epochs'?"),  # not taken as an abbreviation
        (["--xyz"], "unknown key 'xyz': --help lists the keys."),
        (["--lam=much"], 'Parser key "lam": Expected a'),
        (["--epochs=0"], "epochs must be above zero, not 0"),
        (["--patience=-1"], "patience must not be below zero, but it is -1"),
        (["--seed=-1"], "seed must not be below zero"),
        (["--momentum=2"], "momentum must be from 0 to below 1, not 2"),
        (["--lr_warmup_epochs=5", "--epochs=2"], "lr_warmup_epochs is 5, more than the 2 epochs there are"),
        (["--task=lm", "--max_length=1"], "max_length must be at least 2 for lm"),
        (["--config=nowhere.yaml"], "nowhere.yaml"),
        (["--target_sparsity=0.9", "--patience=3"], "patience goes back to an epoch of any sparsity"),
        (["--target_sparsity=0.9", "--lam=0"], "target_sparsity steers lam, which must start above zero"),
        (
            ["--target_sparsity=0.9", "--epochs=1"],
            "target_sparsity is made exact in the last epoch, and masks must have",
        ),
        (["--target_sparsity=0.9", "--epochs=4", "--warmup=0.7"], "give less warmup or more epochs, into which"),
    ],
)
def test_bad_arguments_get_one_line(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = parse_error(args, capsys)
    assert text in message
    assert message.count("\n") == 1


def test_yaml_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lam: 1e-6\nseed: 3\ntargets: [fc, conv1.0]\n")
    config = parse_config(["--config", str(path), "--seed=5", "--mask_lr=1e-02"])
    assert (config.lam, config.seed, config.mask_lr, config.targets) == (1e-6, 5, 1e-2, ("fc", "conv1.0"))
    path.write_text("mask_lr_finale: 1\n")
    assert "unknown key 'mask_lr_finale': did you mean 'mask_lr_final'?" in parse_error(["--config", str(path)], capsys)


def test_none_is_null_where_there_may_be_none() -> None:
    assert parse_config(["--target_sparsity=0.5", "--target_sparsity=None"]).target_sparsity is None  # wandb's agent
    assert parse_config(["--name=None"]).name == "None"


def test_one_word_is_a_tuple_of_one() -> None:
    config = parse_config(["--input_columns", "image", "--tags=a"])
    assert (config.input_columns, config.tags) == (("image",), ("a",))
    assert parse_config(["--trackers", "tensorboard"]).trackers == ("tensorboard",)
    config = parse_config(["--input_columns", "[a, b]", "--tags=[]"])
    assert (config.input_columns, config.tags) == (("a", "b"), ())


def test_a_bare_flag_is_true() -> None:
    config = parse_config(["--pretrained", "--compile", "--lr", "0.1", "--streaming=false", "--split_by_seed", "True"])
    assert (config.pretrained, config.compile, config.streaming, config.split_by_seed) == (True, True, False, True)


def test_a_file_that_is_no_config_is_not_printed_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "table.csv").write_text("one,two,class\n" * 1000)
    assert len(parse_error(["--config", str(tmp_path / "table.csv")], capsys)) < 600


def test_help_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_config(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "--lam LAM" in text
    assert "penalty per weight that is on" in text
    assert "The best is chosen on the test data, whose closing figure is then too good" in " ".join(text.split())
    assert f"default: {TrainConfig.lam}" in text


def test_the_split_of_the_digits_is_fixed_and_stratified() -> None:
    data = digits()
    assert (data["train"].num_rows, data["test"].num_rows) == (1437, 360)
    assert torch.tensor(data["test"]["label"][:]).bincount().tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    assert data["test"]["label"][:] == digits()["test"]["label"][:]
