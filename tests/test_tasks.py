"""Every task from its data to the saved model, which a stock library loads and which answers the same."""

import datetime
import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import timm
import tiny_texts
import torch
import torch.nn.functional as F
import transformers
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader

from binmask_dist.training.config import TrainConfig, parse_config
from binmask_dist.training.data import Stream
from binmask_dist.training.tasks import image as image_task
from binmask_dist.training.tasks import make_task, tabular
from binmask_dist.training.tasks.base import Examples, RunError, Task, seed_everything

CONFIGS = Path(__file__).parent.parent / "configs" / "train"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # five seconds at the end of each pass


def loaders(task: Task, size: int = 8) -> tuple[DataLoader, DataLoader]:
    return (
        DataLoader(task.train, size, collate_fn=task.collate, drop_last=True),
        DataLoader(task.test, size, collate_fn=task.collate),
    )


@torch.no_grad()
def measure(task: Task, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, float | int]]:
    batches = [task.measure(model.eval(), batch) for batch in loaders(task)[1]]
    rows = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    assert all(value.shape == (len(task.test),) for value in rows.values())  # type: ignore[arg-type]
    return rows, task.summarise(rows)


def learn(task: Task, model: torch.nn.Module, passes: int = 3, lr: float = 1e-2) -> list[float]:
    """The mean loss of every pass."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    losses = []
    for _ in range(passes):
        total = []
        for batch in loaders(task)[0]:
            loss = task.learn(model.train(), batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total.append(float(loss.detach()))
        losses.append(sum(total) / len(total))
    return losses


# -- images


def image_config(folder: Path, **options: Any) -> TrainConfig:
    return TrainConfig(dataset=str(folder), **{"image_size": 16, "model": "test_resnet", **options})


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes, bright and dark, of colour images that are not square."""
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 5)):
        for kind, level in (("bright", 200), ("dark", 20)):
            for index in range(count):
                path = tmp_path / "pictures" / split / kind / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(random.integers(level, level + 50, (20, 24, 3), dtype=np.uint8)).save(path)
    return tmp_path / "pictures"


def test_digits_are_decoded_once_and_as_timm_does() -> None:
    task = make_task(TrainConfig())
    images, labels = task.train.tensors  # type: ignore[attr-defined]
    assert (images.shape, images.dtype, labels.dtype) == ((1437, 1, 16, 16), torch.float32, torch.int64)
    assert (len(task.test), task.metric, task.metrics) == (360, "accuracy", ("accuracy", "loss"))  # type: ignore[arg-type]
    transform = timm.data.create_transform((1, 16, 16), crop_pct=1.0, mean=(0.5,), std=(0.5,))
    row = task.data.train[7]  # type: ignore[attr-defined]
    torch.testing.assert_close(images[7], transform(row["image"]), rtol=0, atol=0)
    assert int(labels[7]) == row["label"]


def test_images_from_training_to_a_stock_model(pictures: Path, tmp_path: Path) -> None:
    task = make_task(image_config(pictures))
    model = task.make_model()
    assert model.conv1[0].in_channels == 3
    losses = learn(task, model)
    assert losses[-1] < losses[0]
    rows, metrics = measure(task, model)
    assert set(metrics) == {"loss", "accuracy", "correct", "examples", "auc"}
    assert (metrics["examples"], metrics["correct"]) == (10, int(rows["hit"].sum()))
    assert metrics["auc"] == roc_auc_score(rows["label"], rows["score"])
    images, labels = task.test.tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = model(images)
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(expected, labels)), rel=1e-5)

    (path,) = task.save_model(model, model.state_dict(), tmp_path / "out")
    assert path == tmp_path / "out" / "model.safetensors"
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["classes"] == ["bright", "dark"]
    assert about["input"]["size"] == [3, 16, 16]
    stock = timm.create_model(about["architecture"], **about["arguments"]).eval()
    stock.load_state_dict(load_file(path))
    assert torch.equal(stock(images), expected)


def test_colours_are_seen_behind_many_grey_images(tmp_path: Path) -> None:
    images = [Image.new("L", (4, 4), 9)] * 90 + [Image.new("RGB", (4, 4), "red")] * 10
    features = Features({"image": datasets.Image(), "label": ClassLabel(names=["scan", "photo"])})
    part = Dataset.from_dict({"image": images, "label": [0] * 90 + [1] * 10}, features)
    DatasetDict(train=part.select(range(85, 95)), test=part).save_to_disk(tmp_path / "data")
    assert make_task(image_config(tmp_path / "data")).train[0][0].shape == (3, 16, 16)


def grey_task(folder: Path, images: list[Any], **options: Any) -> Task:
    features = Features({"image": datasets.Image(), "label": ClassLabel(names=["a", "b"])})
    part = Dataset.from_dict({"image": images, "label": [0, 1]}, features)
    DatasetDict(train=part, test=part).save_to_disk(folder)
    return make_task(image_config(folder, image_size=4, **options))


@pytest.mark.parametrize("ending", ["png", "tif", "pgm", "big endian"])
def test_grey_of_16_bits_is_not_cut_off(ending: str, tmp_path: Path) -> None:
    eight = np.arange(0, 256, 16, dtype=np.uint8).reshape(4, 4)
    sixteen: np.ndarray = eight * np.uint16(257)
    if ending == "big endian":
        sixteen, ending = sixteen.astype(">u2"), "tif"
    paths = [str(tmp_path / f"{index}.{ending}") for index in range(2)]
    for path in paths:
        Image.fromarray(sixteen).save(path)
    images = grey_task(tmp_path / "data", paths).train.tensors[0]  # type: ignore[attr-defined]
    torch.testing.assert_close(images[0, 0], torch.from_numpy(eight).float() / 127.5 - 1)


def test_grey_of_32_bits(tmp_path: Path) -> None:
    eight = np.arange(0, 256, 16).reshape(4, 4)
    images = grey_task(tmp_path / "small", [eight.astype(np.int32)] * 2).train.tensors[0]  # type: ignore[attr-defined]
    torch.testing.assert_close(images[0, 0], torch.from_numpy(eight).float() / 127.5 - 1)
    for index, wrong in enumerate((eight.astype(np.int32) * 2, eight.astype(np.int32) - 1, eight / np.float32(255))):
        with pytest.raises(RunError, match=r"its grey goes from .* and what is white is not known; save it as 8 or 16"):
            grey_task(tmp_path / str(index), [wrong] * 2)


@pytest.mark.parametrize("augment", ["flip", "crop", "rand-m9-mstd0.5", "augmix-m3-w2"])
@pytest.mark.parametrize("grey", [False, True])
def test_augmentation_depends_on_seed_epoch_and_example(augment: str, grey: bool, pictures: Path) -> None:
    if grey:
        for path in pictures.rglob("*.png"):
            Image.open(path).convert("L").save(path)
    task, twin = (make_task(image_config(pictures, augment=augment)) for _ in range(2))
    assert isinstance(task.train, Examples)
    first = [image for image, _ in (task.train[index] for index in range(24))]
    assert {tuple(image.shape) for image in first} == {(1 if grey else 3, 16, 16)}
    plain = make_task(image_config(pictures)).train.tensors[0]  # type: ignore[attr-defined]
    assert any(not torch.equal(image, other) for image, other in zip(first, plain, strict=True))
    assert isinstance(twin.train, Examples)
    seed_everything(99)
    assert torch.equal(twin.train[5][0], first[5])
    twin.train.set_epoch(1)
    assert any(not torch.equal(twin.train[index][0], first[index]) for index in range(24))
    assert task.test.tensors[0].shape[0] == 10  # type: ignore[attr-defined]


def test_the_strongest_augmentation_of_timm(pictures: Path) -> None:
    """It keeps none of the bits of colours, which Pillow refuses."""
    task = make_task(image_config(pictures, augment="rand-m10-n9-p1.0-inc1"))
    blacks = [bool((task.train[index][0] == -1).all()) for index in range(24)]  # type: ignore[index]
    assert set(blacks) == {False, True}


def test_large_sets_are_decoded_as_they_are_needed(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = make_task(image_config(pictures))
    monkeypatch.setattr(image_task, "IN_MEMORY", 1000)
    large = make_task(image_config(pictures))
    assert isinstance(large.train, Examples)
    for batches in zip(*(loaders(task)[1] for task in (small, large)), strict=True):
        assert torch.equal(batches[0][0], batches[1][0])
        assert torch.equal(batches[0][1], batches[1][1])


def test_a_stream_of_images(pictures: Path) -> None:
    options = {"streaming": True, "steps_per_epoch": 3, "batch_size": 8, "shuffle_buffer": 100}
    task = make_task(image_config(pictures, **options))
    assert isinstance(task.train, Stream)
    batches = list(loaders(task)[0])
    assert [tuple(images.shape) for images, _ in batches] == [(8, 3, 16, 16)] * 3
    labels = torch.cat([labels for _, labels in batches])
    assert labels.bincount().tolist() == [12, 12]
    bright = torch.cat([images for images, _ in batches]).mean(dim=(1, 2, 3)) > 0
    assert torch.equal(bright, labels == 0)


def test_a_vision_transformer_of_timm_gets_the_size_of_the_images(pictures: Path) -> None:
    task = make_task(image_config(pictures, model="test_vit", image_size=32))
    rows, _ = measure(task, task.make_model())
    assert len(rows["loss"]) == 10


def test_new_models_see_all_of_an_image_and_pretrained_ones_what_timm_shows_them(pictures: Path) -> None:
    path = pictures / "test" / "bright" / "0.png"
    plain = Image.open(path).resize((16, 16), Image.Resampling.BILINEAR)
    task = make_task(image_config(pictures))
    seen = (task.test[0][0] + 1) * 127.5
    torch.testing.assert_close(seen.permute(1, 2, 0), torch.from_numpy(np.array(plain)).float())
    about = timm.get_pretrained_cfg("resnet18")
    assert about is not None and about.crop_mode == "center" and about.crop_pct < 1
    theirs = timm.data.resolve_data_config({"input_size": (3, 32, 32)}, about.to_dict())
    task = make_task(image_config(pictures, model="resnet18", pretrained=True, image_size=32))
    assert torch.equal(task.test[0][0], timm.data.create_transform(**theirs)(Image.open(path)))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_saved_processor_prepares_images_as_training_did(mode: str, pictures: Path, tmp_path: Path) -> None:
    """Even where the processor of the pretrained model does something else, and shows grey to a model of colours."""
    for path in pictures.rglob("*.png"):
        Image.open(path).convert(mode).save(path)
    sizes = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}
    network = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_channels=3, **sizes))
    network.save_pretrained(tmp_path / "resnet")
    look = {"resample": Image.Resampling.BICUBIC, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    theirs = transformers.ConvNextImageProcessor(size={"shortest_edge": 224}, crop_pct=0.875, **look)
    theirs.save_pretrained(tmp_path / "resnet")
    for pretrained in (True, False):
        task = make_task(image_config(pictures, model=str(tmp_path / "resnet"), pretrained=pretrained))
        model = task.make_model()
        task.save_model(model, model.state_dict(), tmp_path / "out")
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
        image = Image.open(pictures / "test" / "bright" / "0.png")
        pixels = processor(image, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(pixels, task.test[0][0], rtol=0, atol=0.03)  # two resizers, and a level is 1/255


@pytest.fixture
def timm_folder(tmp_path: Path) -> Path:
    """A vision transformer for images of 32 pixels, without its weights."""
    about = {
        "input_size": [3, 32, 32],
        "fixed_input_size": True,
        "mean": [0.1] * 3,
        "std": [0.2] * 3,
        "classifier": "head",
    }
    saved = {"architecture": "test_vit", "model_args": {"depth": 2}, "pretrained_cfg": {**about, "num_classes": 5}}
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.json").write_text(json.dumps(saved))
    return tmp_path / "saved"


def test_a_model_from_a_folder_of_timm(pictures: Path, timm_folder: Path, tmp_path: Path) -> None:
    task = make_task(image_config(pictures, model=f"local-dir:{timm_folder}"))
    model = task.make_model()
    assert (len(model.blocks), model.num_classes, model.patch_embed.img_size) == (2, 2, (16, 16))
    (path,) = task.save_model(model, model.state_dict(), tmp_path / "out")
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    stock = timm.create_model(about["architecture"], **about["arguments"])  # without the folder
    stock.load_state_dict(load_file(path))


def test_a_pretrained_model_from_a_folder_of_timm(pictures: Path, timm_folder: Path) -> None:
    options = {"model": f"local-dir:{timm_folder}", "pretrained": True}
    with pytest.raises(RunError, match="timm cannot make local-dir:"):
        make_task(image_config(pictures, **options)).make_model()
    weights = timm.create_model("test_vit", depth=2, num_classes=5, img_size=32).state_dict()
    save_file(weights, timm_folder / "model.safetensors")
    task = make_task(image_config(pictures, image_size=32, **options))
    assert torch.equal(task.make_model().blocks[1].attn.qkv.weight, weights["blocks.1.attn.qkv.weight"])
    assert task.look["mean"] == [0.1] * 3  # type: ignore[attr-defined]


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.ViTConfig(**sizes, image_size=16, patch_size=4).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_a_vision_transformer_of_transformers(pictures: Path, vit: Path, tmp_path: Path) -> None:
    task = make_task(image_config(pictures, model=str(vit), model_args={"num_hidden_layers": 2}))
    model = task.make_model()
    assert model.config.num_hidden_layers == 2
    learn(task, model, passes=1)
    rows, _ = measure(task, model)
    out = tmp_path / "out"
    assert task.save_model(model, model.state_dict(), out) == [out / "model.safetensors"]
    stock = transformers.AutoModelForImageClassification.from_pretrained(out).eval()
    assert stock.config.id2label == {0: "bright", 1: "dark"}
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    assert list(processor.image_mean) == [0.5, 0.5, 0.5]

    again = make_task(image_config(pictures, model=str(out), pretrained=True))
    same, _ = measure(again, again.make_model())
    assert torch.equal(same["loss"], rows["loss"])
    with pytest.raises(RunError, match="takes images of 16 pixels; give that image_size"):
        make_task(image_config(pictures, model=str(out), pretrained=True, image_size=32))


def test_label_smoothing_is_for_training_only(pictures: Path) -> None:
    plain, smooth = (make_task(image_config(pictures, label_smoothing=value)) for value in (0.0, 0.3))
    model = plain.make_model().eval()
    batch = next(iter(loaders(plain)[1]))
    with torch.no_grad():
        logits = model(batch[0])
        assert float(smooth.learn(model, batch)["loss"]) == pytest.approx(
            float(F.cross_entropy(logits, batch[1], label_smoothing=0.3))
        )
        assert torch.equal(smooth.measure(model, batch)["loss"], plain.measure(model, batch)["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet81"}, "model 'resnet81' is neither a folder here nor a name that timm knows; did you mean"),
        ({"model": "xyzzy"}, "such as resnet18"),
        ({"augment": "mirror"}, "augment 'mirror' is unknown; take flip, crop, or"),
        ({"augment": "rand-q9"}, "augment 'rand-q9' is unknown"),
        ({"augment": "rand-mx"}, "augment 'rand-mx' is unknown"),  # timm would take it for rand
        ({"augment": "rand-m9-tfoo"}, "augment 'rand-m9-tfoo' is unknown"),
        ({"input_columns": ("label",)}, "'label' holds no readable images"),
        ({"metric": "f1"}, "metric 'f1' is not measured here; there is accuracy, loss, auc"),
        ({"model": "lenet5_bn", "pretrained": True}, "timm has no pretrained weights for lenet5_bn"),
        ({"model": "test_vit.mine"}, r"timm cannot find the model test_vit.mine: Invalid pretrained tag \(mine\)"),
        ({"model": "local-dir:/no/where"}, "timm cannot find the model local-dir:/no/where: Config file not found"),
        ({"model": "no/where"}, "transformers cannot make the config of no/where"),
    ],
)
def test_bad_options_for_images(options: dict[str, Any], message: str, pictures: Path) -> None:
    with pytest.raises(RunError, match=message) as raised:
        make_task(image_config(pictures, **options))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("augment", ["", "flip"])
def test_an_image_that_cannot_be_read(augment: str, pictures: Path) -> None:
    (pictures / "train" / "dark" / "7.png").write_bytes(b"no image")
    with pytest.raises(RunError, match=r"7.png, in the column 'image', cannot be read: cannot identify image file"):
        task = make_task(image_config(pictures, augment=augment))
        for index in range(len(task.train)):  # type: ignore[arg-type]
            task.train[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_args": {"num_classes": 5}}, "model_args: num_classes is 5, but these data make it 2; leave it out"),
        ({"model_args": {"in_chans": 4}}, "model_args: in_chans is 1 for grey images or 3 for colours, not 4"),
        ({"model": "vgg19_bn_32px"}, "vgg19_bn_32px does not take images of 3 x 16 x 16; give another image_size"),
        ({"model": "mlp_bn", "model_args": {"in_features": 5}}, "mlp_bn does not take images of 3 x 16 x 16"),
        (
            {"model": "test_vit", "model_args": {"global_pool": ""}},
            r"test_vit makes \(.*\) numbers of an image, and not one for each of 2",
        ),
    ],
)
def test_models_that_do_not_fit_the_images(options: dict[str, Any], message: str, pictures: Path) -> None:
    with pytest.raises(RunError, match=message) as raised:
        make_task(image_config(pictures, **options)).make_model()
    assert "\n" not in str(raised.value)


def test_trying_a_model_changes_nothing(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(image_config(pictures, model_args={"drop_rate": 0.5}))
    torch.manual_seed(0)
    tried = task.make_model()
    drawn = torch.rand(3)
    monkeypatch.setattr(image_task, "is_whole", lambda model: False)
    torch.manual_seed(0)
    untried = task.make_model()
    assert torch.equal(torch.rand(3), drawn)
    assert tried.training is untried.training
    for name, value in untried.state_dict().items():
        assert torch.equal(tried.state_dict()[name], value), name


def test_arguments_that_a_model_does_not_take(pictures: Path, vit: Path) -> None:
    task = make_task(image_config(pictures, model_args={"depht": 3}))
    with pytest.raises(RunError, match=r"timm cannot make test_resnet with .*depht=3: .*unexpected keyword"):
        task.make_model()
    with pytest.raises(RunError, match="has no entry 'hiden_size'; did you mean 'hidden_size'"):
        make_task(image_config(pictures, model=str(vit), model_args={"hiden_size": 3}))


# -- texts


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return tiny_texts.save_bert(tmp_path / "bert")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return tiny_texts.save_gpt2(tmp_path / "gpt2")


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    return tiny_texts.write_reviews(tmp_path / "reviews.jsonl")


def text_config(model: Path, data: Path, **options: Any) -> TrainConfig:
    options = {"input_columns": ("text",), "max_length": 16, "batch_size": 8, **options}
    return TrainConfig(task="text", model=str(model), dataset=str(data), **options)


@pytest.mark.parametrize("inputs", [("text",), ("text", "other")])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_texts_from_training_to_a_stock_model(
    kind: str, inputs: tuple[str, ...], reviews: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    task = make_task(text_config(request.getfixturevalue(kind), reviews, input_columns=inputs))
    model = task.make_model()
    batches = list(loaders(task)[1])
    assert all(batch["attention_mask"].sum(dim=1).max() == batch["input_ids"].shape[1] for batch in batches)
    losses = learn(task, model, passes=5)
    assert losses[-1] < losses[0]
    rows, metrics = measure(task, model)
    assert metrics["auc"] == roc_auc_score(rows["label"], rows["score"])
    (path,) = task.save_model(model, model.state_dict(), tmp_path / "out")
    assert set(load_file(path)) <= set(model.state_dict())

    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert stock.config.label2id == {"bad": 0, "good": 1}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    part = task.data.test  # type: ignore[attr-defined]
    tokens = tokenizer(*(part[name][:] for name in inputs), padding=True, truncation=True, max_length=16)
    with torch.no_grad():
        logits = stock(**{name: torch.tensor(value) for name, value in tokens.items()}).logits
    torch.testing.assert_close(logits[:, 1] - logits[:, 0], rows["score"], rtol=1e-4, atol=1e-5)


def test_texts_are_cut_and_padded(bert: Path, reviews: Path) -> None:
    task = make_task(text_config(bert, reviews, max_length=5))
    batch = next(iter(loaders(task)[1]))
    assert batch["input_ids"].shape == (8, 5)
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == 0)


def test_texts_that_are_numbers_in_the_training_part_are_refused(bert: Path, tmp_path: Path) -> None:
    train, test = Dataset.from_dict({"s": [1, 2], "y": [0, 1]}), Dataset.from_dict({"s": ["a", "b"], "y": [0, 1]})
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "data")
    with pytest.raises(RunError, match="the column 's' holds numbers in the training data and words in the test data"):
        make_task(text_config(bert, tmp_path / "data", input_columns=()))


def test_a_stream_of_texts(bert: Path, reviews: Path) -> None:
    options = {"streaming": True, "steps_per_epoch": 6, "test_split": str(reviews)}
    streamed, plain = make_task(text_config(bert, reviews, **options)), make_task(text_config(bert, reviews))
    assert isinstance(streamed.train, Stream)
    batches = list(loaders(streamed)[0])
    assert torch.cat([batch["labels"] for batch in batches]).bincount().tolist() == [24, 24]
    assert set(batches[0]) == set(next(iter(loaders(plain)[0])))
    model = streamed.make_model()
    assert learn(streamed, model)[-1] > 0


def test_pretrained_weights_and_a_head_of_another_size(bert: Path, reviews: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(bert, num_labels=5)
    source = transformers.BertForSequenceClassification(config)
    source.save_pretrained(bert)
    model = make_task(text_config(bert, reviews, pretrained=True)).make_model()
    state, before = model.state_dict(), source.state_dict()
    assert state["classifier.weight"].shape == (2, 16)
    same = [name for name in before if not name.startswith("classifier")]
    assert all(torch.equal(state[name], before[name]) for name in same)
    fresh = make_task(text_config(bert, reviews)).make_model().state_dict()
    name = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(fresh[name], before[name])


def test_weights_are_fp32_however_they_were_stored(bert: Path, reviews: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(bert)
    transformers.BertForSequenceClassification(config).bfloat16().save_pretrained(bert)
    assert transformers.AutoConfig.from_pretrained(bert).dtype == torch.bfloat16
    for pretrained in (False, True):
        model = make_task(text_config(bert, reviews, pretrained=pretrained)).make_model()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_an_architecture_by_name_needs_no_hub(bert: Path, reviews: Path) -> None:
    arguments = {**tiny_texts.SMALL, "vocab_size": 16}
    model = make_task(text_config(Path("bert"), reviews, tokenizer=str(bert), model_args=arguments)).make_model()
    assert (type(model).__name__, model.config.hidden_size) == ("BertForSequenceClassification", 16)


def test_a_folder_that_is_called_as_an_architecture(bert: Path, reviews: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bert.parent)
    task = make_task(text_config(Path("bert"), reviews))
    assert task.make_model().config.hidden_size == 16


def test_a_model_without_a_longest_text(bert: Path, reviews: Path) -> None:
    """XLNet's config has -1 for what it takes."""
    arguments = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 16}
    task = make_task(text_config(Path("xlnet"), reviews, tokenizer=str(bert), model_args=arguments))
    assert len(measure(task, task.make_model())[0]["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_columns": ()}, r"more than one column with texts \(text, other, opinion\)"),
        ({"input_columns": ("label",)}, "the column 'label' cannot be an input: it must hold texts"),
        ({"input_columns": ("txt",)}, "no column 'txt' among text, other, opinion, label; did you mean 'text'"),
        ({"max_length": 64}, "max_length 64 is more than the 32 tokens that"),
        ({"model_args": {"vocab_size": 8}}, r"tokenizer has 15 tokens, but the model knows 8; .*vocab_size: 15"),
        ({"model_args": {"hiden_size": 8}}, "has no entry 'hiden_size'; did you mean 'hidden_size'"),
        ({"model_args": {"num_labels": 7}}, "model_args: num_labels is 7, but these data make it"),
        ({"tokenizer": "no/where"}, "there is no tokenizer no/where; give another"),
        ({"pretrained": True}, None),
    ],
)
def test_bad_options_for_texts(options: dict[str, Any], message: str | None, bert: Path, reviews: Path) -> None:
    with pytest.raises(RunError, match=message or "transformers cannot make .*bert") as raised:
        make_task(text_config(bert, reviews, **options)).make_model()
    assert "\n" not in str(raised.value)


def test_a_model_that_is_not_there_is_not_called_a_tokenizer(reviews: Path) -> None:
    with pytest.raises(RunError, match="there is no model no/where with a tokenizer; give another model, or tokenizer"):
        make_task(text_config(Path("no/where"), reviews))


SMALL_ROBERTA = {**tiny_texts.SMALL, "vocab_size": 16, "max_position_embeddings": 32}
SMALL_BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 16, "eos_token_id": 15}
SMALL_BART |= {f"{part}_{key}": 2 for part in ("encoder", "decoder") for key in ("attention_heads", "ffn_dim")}


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("roberta", SMALL_ROBERTA),  # counts positions from the one after its pad token's
        ("bart", SMALL_BART),  # looks for the end of a text, which this tokenizer does not write
        ("t5", {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16, "d_kv": 8, "vocab_size": 16}),
    ],
)
def test_models_that_do_not_fit_the_texts(model: str, arguments: dict, bert: Path, reviews: Path) -> None:
    task = make_task(text_config(Path(model), reviews, tokenizer=str(bert), max_length=32, model_args=arguments))
    with pytest.raises(RunError, match=f"{model} does not take 32 tokens of this tokenizer; give another") as raised:
        task.make_model()
    assert "\n" not in str(raised.value)


def test_a_model_of_images_is_no_model_of_texts(vit: Path, bert: Path, reviews: Path) -> None:
    with pytest.raises(RunError, match="vit is no model of texts: its config has no vocab_size"):
        make_task(text_config(vit, reviews, tokenizer=str(bert)))


# -- language models


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tiny_texts.write_book(tmp_path / "book.txt")


def lm_config(model: Path, data: Path, **options: Any) -> TrainConfig:
    return TrainConfig(task="lm", model=str(model), dataset=str(data), **{"max_length": 8, "batch_size": 4, **options})


def test_texts_are_packed_with_no_token_lost(gpt2: Path, tmp_path: Path) -> None:
    texts = ["it is a good film", "", "the book is not bad", "very good"]
    Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "texts")
    task = make_task(lm_config(gpt2, tmp_path / "texts", test_fraction=0.25))
    tokenizer = transformers.AutoTokenizer.from_pretrained(gpt2)
    tokens = [token for text in texts[:3] if text for token in [*tokenizer(text)["input_ids"], 0]]
    assert [block for row in task.train for block in row["input_ids"]] == tokens
    assert [len(row["input_ids"]) for row in task.train] == [8, 4]
    batch = task.collate([task.train[0], task.train[1]])  # type: ignore[index, misc]
    assert batch["attention_mask"].sum(dim=1).tolist() == [8, 4]


def test_columns_beside_the_text_may_differ(gpt2: Path, tmp_path: Path) -> None:
    train = Dataset.from_dict({"text": ["it is a good film"] * 4, "number": [1, 2, 3, 4]})
    test = Dataset.from_dict({"text": ["very good"] * 2, "page": [1, 2]})
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "texts")
    task = make_task(lm_config(gpt2, tmp_path / "texts"))
    assert task.train.column_names == task.test.column_names == ["input_ids"]  # type: ignore[attr-defined]


def test_an_encoder_is_no_language_model(bert: Path, book: Path) -> None:
    with pytest.raises(RunError, match="bert sees the tokens that it is to predict; take a causal model such as gpt2"):
        make_task(lm_config(bert, book)).make_model()
    assert make_task(lm_config(bert, book, model_args={"is_decoder": True})).make_model()


def test_a_language_model_with_too_few_positions_for_a_block(bert: Path, book: Path) -> None:
    """No block of the test part is as long as those of training."""
    arguments = {**SMALL_ROBERTA, "is_decoder": True}
    options = {"tokenizer": str(bert), "max_length": 32, "model_args": arguments, "test_fraction": 0.1}
    task = make_task(lm_config(Path("roberta"), book, **options))
    with pytest.raises(RunError, match="roberta does not take blocks of 32 tokens; give another max_length, model or"):
        task.make_model()


def test_lines_go_on_in_the_next_line(gpt2: Path, book: Path) -> None:
    tokens = [token for row in make_task(lm_config(gpt2, book)).train for token in row["input_ids"]]
    assert 0 not in tokens  # the end of a text
    assert tokens[:6] == [7, 8, 9, 1, 3, 11]


def test_language_from_training_to_a_stock_model(gpt2: Path, book: Path, tmp_path: Path) -> None:
    task = make_task(lm_config(gpt2, book, max_length=7))
    assert (task.metric, task.metrics) == ("loss", ("loss", "perplexity"))
    model = task.make_model()
    losses = learn(task, model)
    assert losses[-1] < losses[0]
    rows, metrics = measure(task, model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # tied weights, as if gathered
    files = task.save_model(model, state, tmp_path / "out")
    assert files == [tmp_path / "out" / "model.safetensors"]
    assert files[0].stat().st_mode & 0o044
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == []

    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    total = count = 0.0
    for row in task.test:
        block = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            loss = stock(input_ids=block, labels=block).loss
        total, count = total + float(loss) * (block.shape[1] - 1), count + block.shape[1] - 1
    assert metrics["tokens"] == count == int(rows["tokens"].sum())
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-5)
    assert len(set(rows["tokens"].tolist())) > 1  # the last block is shorter
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 0


def test_the_loss_is_the_mean_over_tokens(gpt2: Path, book: Path) -> None:
    task = make_task(lm_config(gpt2, book, max_length=7))
    model = task.make_model().eval()
    short = {"input_ids": [1, 2, 3]}
    batch = task.collate([task.train[0], short])  # type: ignore[index, misc]
    with torch.no_grad():
        rows = task.measure(model, batch)
        mean = rows["loss"].sum() / rows["tokens"].sum()
        assert rows["tokens"].tolist() == [6, 2]
        assert float(task.learn(model, batch)["loss"]) == pytest.approx(float(mean), rel=1e-5)


def test_a_stream_of_language(gpt2: Path, book: Path) -> None:
    options = {"streaming": True, "steps_per_epoch": 4, "test_split": str(book)}
    task = make_task(lm_config(gpt2, book, **options))
    assert isinstance(task.train, Stream)
    batches = list(loaders(task, 4)[0])
    assert len(batches) == 4
    assert batches[0]["input_ids"].shape == (4, 8)


def test_sharded_files_are_all_named(gpt2: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(lm_config(gpt2, book))
    model = task.make_model()
    save = model.save_pretrained
    monkeypatch.setattr(model, "save_pretrained", lambda *args, **more: save(*args, max_shard_size="4KB", **more))
    files = task.save_model(model, model.state_dict(), tmp_path / "out")
    assert len(files) > 1
    assert all(path.is_file() for path in files)
    names = [name for path in files for name in load_file(path)]
    assert set(model.state_dict()) - set(names) <= {"lm_head.weight"}
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(tensor, stock.state_dict()[name]) for name, tensor in model.state_dict().items())


# -- tables


def table_config(data: Path, **options: Any) -> TrainConfig:
    return TrainConfig(task="tabular", dataset=str(data), **{"model": "mlp_tanh", **options})


@pytest.fixture
def people(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    age, town = random.integers(20, 60, 80), random.choice(["York", "Bath", "Ely"], 80)
    rows = {
        "age": age.tolist(),
        "town": town.tolist(),
        "x": random.normal(5, 2, (80, 3)).tolist(),
        "class": ["old" if value > 40 else "young" for value in age],
    }
    features = Features(
        {
            "age": Value("int64"),
            "town": Value("string"),
            "x": datasets.List(Value("float32"), 3),
            "class": Value("string"),
        }
    )
    Dataset.from_dict(rows, features).to_parquet(tmp_path / "people.parquet")
    return tmp_path / "people.parquet"


def test_tables_from_training_to_a_stock_model(people: Path, tmp_path: Path) -> None:
    task = make_task(table_config(people))
    inputs, _ = task.train.tensors  # type: ignore[attr-defined]
    assert inputs.shape == (64, 1 + 3 + 3)
    numbers, words = inputs[:, [0, 4, 5, 6]], inputs[:, 1:4]
    torch.testing.assert_close(numbers.mean(dim=0), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(numbers.std(dim=0, correction=0), torch.ones(4))
    assert torch.equal(words.sum(dim=1), torch.ones(64))
    model = task.make_model()
    learn(task, model, passes=10)
    _, metrics = measure(task, model)
    assert metrics["auc"] > 0.9
    (path,) = task.save_model(model, model.state_dict(), tmp_path / "out")
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert (about["classes"], about["input"][1]["words"]) == (["old", "young"], ["Bath", "Ely", "York"])
    stock = timm.create_model(about["architecture"], **about["arguments"]).eval()
    stock.load_state_dict(load_file(path))

    row, scales = task.data.test[3], about["input"]  # type: ignore[attr-defined]
    by_hand = [(row["age"] - scales[0]["mean"][0]) / scales[0]["std"][0]]
    by_hand += [float(word == row["town"]) for word in scales[1]["words"]]
    by_hand += [(x - mean) / std for x, mean, std in zip(row["x"], scales[2]["mean"], scales[2]["std"], strict=True)]
    torch.testing.assert_close(torch.tensor(by_hand), task.test.tensors[0][3])  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = model.eval()(task.test.tensors[0])  # type: ignore[attr-defined]
        assert torch.equal(stock(task.test.tensors[0]), expected)  # type: ignore[attr-defined]


def test_a_word_that_training_never_saw_is_none_of_them(tmp_path: Path) -> None:
    train = Dataset.from_dict({"w": ["a", "b", None, "a"], "y": [0, 1, 0, 1]})
    test = Dataset.from_dict({"w": ["c", None], "y": [0, 1]})
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "data")
    task = make_task(table_config(tmp_path / "data"))
    assert task.test.tensors[0].tolist() == [[0, 0, 0], [0, 0, 1]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_stream_of_rows(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled as the whole table is, though it is read in pieces; and each of its rows is the one it was."""
    monkeypatch.setattr(tabular, "PIECE", 7)
    count = 40
    columns: dict[str, Any] = {"age": [i * 1.5 for i in range(count)], "n": [*range(count)]}
    columns |= {"town": [f"t{i % 5}" for i in range(count)]}
    columns |= {"x": [[i, i * i] for i in range(count)]} if suffix == "parquet" else {}
    table = Dataset.from_dict({**columns, "y": [i % 2 for i in range(count)]})
    for name in ("train", "test"):
        getattr(table, f"to_{suffix}")(tmp_path / f"{name}.{suffix}")
    files = dict(task="tabular", model="mlp_tanh", dataset=str(tmp_path / f"train.{suffix}"))
    files |= dict(test_split=str(tmp_path / f"test.{suffix}"), batch_size=8)
    plain = make_task(TrainConfig(**files))
    streamed = make_task(TrainConfig(**files, streaming=True, steps_per_epoch=5))
    for one, other in zip(plain.scaling, streamed.scaling, strict=True):  # type: ignore[attr-defined]
        assert one.keys() == other.keys() and one["column"] == other["column"]
        for key in one.keys() - {"column"}:
            assert one[key] == (other[key] if key == "words" else pytest.approx(other[key]))
    inputs, labels = map(torch.cat, zip(*loaders(streamed)[0], strict=True))
    order = inputs[:, 0].argsort()
    torch.testing.assert_close(inputs[order], plain.train.tensors[0])  # type: ignore[attr-defined]
    assert torch.equal(labels[order], plain.train.tensors[1])  # type: ignore[attr-defined]


def test_a_stream_that_lacks_a_column_is_refused(tmp_path: Path) -> None:
    test = Dataset.from_dict({"a": [1, 2], "b": [1, 2], "y": [0, 1]})
    test.to_csv(tmp_path / "test.csv")
    test.remove_columns("b").to_csv(tmp_path / "train.csv")
    options = {"test_split": str(tmp_path / "test.csv"), "streaming": True, "steps_per_epoch": 1}
    with pytest.raises(RunError, match="the column 'b' is in the test data and not in the training data"):
        make_task(TrainConfig(task="tabular", model="mlp_tanh", dataset=str(tmp_path / "train.csv"), **options))
    (tmp_path / "train.csv").write_text("a,b,y\n")
    with pytest.raises(RunError, match="the training split is empty"):
        make_task(TrainConfig(task="tabular", model="mlp_tanh", dataset=str(tmp_path / "train.csv"), **options))


def test_lists_of_another_length_in_the_test_part_are_refused(tmp_path: Path) -> None:
    train = Dataset.from_dict({"x": [[1, 2, 3], [4, 5, 6]], "y": [0, 1]})
    test = Dataset.from_dict({"x": [[1, 2], [4, 5]], "y": [0, 1]})
    DatasetDict(train=train, test=test).save_to_disk(tmp_path / "data")
    with pytest.raises(RunError, match="'x' have 3 numbers in the training data and 2 in the test data; make"):
        make_task(table_config(tmp_path / "data"))


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"x": [1.0, None, 3.0, 4.0]}, {}, "the column 'x' has no number in 1 rows"),
        ({"x": [[1], [2], [3, 4], [5]]}, {}, "the lists in column 'x' are not all of the same length"),
        ({"x": [1, 2, 3, 4]}, {"model": "resnet18"}, "takes the models mlp_bn and mlp_tanh, not resnet18"),
        ({"x": [1, 2, 3, 4]}, {"streaming": True, "steps_per_epoch": 1, "method": "logistic"}, "leave streaming out"),
        ({"x": [1, 2, 3, 4]}, {"model_args": {"in_features": 2}}, "in_features is 2, but these data make it 1"),
        ({"x": [1, 2, 3, 4]}, {"metric": "f1"}, "metric 'f1' is not measured here"),
    ],
)
def test_tables_that_cannot_be_used(columns: dict, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    part = Dataset.from_dict({**columns, "y": [0, 1, 0, 1]})
    DatasetDict(train=part, test=part).save_to_disk(tmp_path / "data")
    with pytest.raises(RunError, match=message):
        make_task(table_config(tmp_path / "data", **options))


def test_a_column_of_one_part_alone(tmp_path: Path) -> None:
    train = Dataset.from_dict({"a": [1, 2, 3, 4], "b": [1, 2, 3, 4], "y": [0, 1, 0, 1]})
    DatasetDict(train=train, test=train.remove_columns("b")).save_to_disk(tmp_path / "data")
    message = "the column 'b' is in the training data and not in the test data; add it there"
    for options in ({}, {"input_columns": ("a", "b")}):
        with pytest.raises(RunError, match=message):
            make_task(table_config(tmp_path / "data", **options))
    assert make_task(table_config(tmp_path / "data", input_columns=("a",))).train.tensors[0].shape == (4, 1)


@pytest.mark.parametrize("options", [{}, {"input_columns": ("age",)}])
def test_a_column_that_is_not_alike_in_both_parts(options: dict[str, Any], tmp_path: Path) -> None:
    kinds = {
        "numbers": [1, 2],
        "words": ["1", "?"],
        "lists of numbers": [[1], [2]],
        "neither numbers nor words": [datetime.date(2026, 1, day) for day in (1, 2)],
    }
    parts = {name: Dataset.from_dict({"age": ages, "x": [1, 2], "y": [0, 1]}) for name, ages in kinds.items()}
    for index, (one, other) in enumerate(itertools.permutations(kinds, 2)):
        DatasetDict(train=parts[one], test=parts[other]).save_to_disk(tmp_path / str(index))
        message = f"the column 'age' holds {one} in the training data and {other} in the test data; make them alike"
        with pytest.raises(RunError, match=message):
            make_task(table_config(tmp_path / str(index), **options))
    assert make_task(table_config(tmp_path / "0", input_columns=("x",))).train.tensors[0].shape == (2, 1)


def test_a_column_of_neither_numbers_nor_words_is_left_out_and_named(tmp_path: Path) -> None:
    part = Dataset.from_dict({"x": [1, 2], "when": [datetime.date(2026, 1, day) for day in (1, 2)], "y": [0, 1]})
    DatasetDict(train=part, test=part).save_to_disk(tmp_path / "data")
    with pytest.warns(UserWarning, match="neither numbers nor words, or the index of .*, are left out: when"):
        task = make_task(table_config(tmp_path / "data"))
    assert task.train.tensors[0].shape == (2, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_the_index_of_a_pandas_table_is_no_input(ending: str, tmp_path: Path) -> None:
    """The rows of many tables are sorted by class: their numbers would give it away."""
    frame = pandas.DataFrame({"x": np.arange(20.0) % 3, "y": np.arange(20) // 10}).sample(frac=1, random_state=0)
    write = {"parquet": frame.to_parquet, "csv": frame.to_csv}[ending]
    write(tmp_path / f"table.{ending}")
    name = {"parquet": "__index_level_0__", "csv": "Unnamed: 0"}[ending]
    with pytest.warns(UserWarning, match=f"the index of a pandas table, are left out: {name}"):
        task = make_task(table_config(tmp_path / f"table.{ending}"))
    assert task.train.tensors[0].shape == (16, 1)  # type: ignore[attr-defined]
    asked = make_task(table_config(tmp_path / f"table.{ending}", input_columns=("x", name)))
    assert asked.train.tensors[0].shape == (16, 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["float64", "int64"])
def test_large_numbers_are_told_apart(kind: str, tmp_path: Path) -> None:
    seconds = 1_700_000_000 + np.arange(20)
    Dataset.from_dict({"x": seconds.astype(kind), "y": np.arange(20) % 2}).to_parquet(tmp_path / "table.parquet")
    task = make_task(table_config(tmp_path / "table.parquet"))
    assert len(task.train.tensors[0].unique()) == 16  # type: ignore[attr-defined]


def test_a_column_of_too_many_words(tmp_path: Path) -> None:
    part = Dataset.from_dict({"name": [f"n{i}" for i in range(1001)], "y": [i % 2 for i in range(1001)]})
    DatasetDict(train=part, test=part).save_to_disk(tmp_path / "data")
    with pytest.raises(RunError, match="the column 'name' has more than 1000 different words"):
        make_task(table_config(tmp_path / "data"))


def test_one_class_in_the_test_split(tmp_path: Path) -> None:
    parts = {"train": {"x": [1, 2], "y": [0, 1]}, "test": {"x": [1, 2], "y": [1, 1]}}
    DatasetDict({name: Dataset.from_dict(part) for name, part in parts.items()}).save_to_disk(tmp_path / "data")
    with pytest.raises(RunError, match="the test split has examples of one class only"):
        make_task(table_config(tmp_path / "data"))


def test_three_classes_have_no_auc(tmp_path: Path) -> None:
    features = Features({"x": Value("float32"), "y": ClassLabel(names=["a", "b", "c"])})
    part = Dataset.from_dict({"x": [0.1, 0.2, 0.3], "y": [0, 1, 2]}, features)
    DatasetDict(train=part, test=part).save_to_disk(tmp_path / "data")
    task = make_task(table_config(tmp_path / "data"))
    assert task.metrics == ("accuracy", "loss")
    rows, metrics = measure(task, task.make_model())
    assert set(rows) == {"loss", "hit"}
    assert set(metrics) == {"loss", "accuracy", "correct", "examples"}


# -- the ready examples


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_configs_are_valid(path: Path) -> None:
    config = parse_config(["--config", str(path)])
    expected = {"cifar10": "image", "digits": "image", "text": "text", "lm": "lm", "tabular": "tabular"}
    assert config.task == expected[path.stem]
