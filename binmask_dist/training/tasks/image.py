"""Classification of images, by a model of timm or transformers."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import torch
from timm.data import create_transform
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from binmask_dist.training.augmentation import augmented
from binmask_dist.training.columns import find_image
from binmask_dist.training.config import TrainConfig
from binmask_dist.training.data import Stream, finish_rows
from binmask_dist.training.models import (
    TimmModel,
    check_sizes,
    first_line,
    is_timm,
    is_whole,
    make_timm,
    make_transformers,
    named_classes,
    on_trial,
    save_timm,
    save_transformers,
    transformers_config,
)
from binmask_dist.training.tasks.base import Batch, Examples, RunError
from binmask_dist.training.tasks.classification import Classification, in_precision_of

IN_MEMORY = 2**30  # bytes of decoded images that are kept
GREY_16 = ("I;16", "I;16L", "I;16B", "I;16N")  # Pillow's modes of 16 bits
GREY = ("1", "L", "LA", "I", "F", *GREY_16)


class ImageClassification(Classification):
    """Images become float tensors, channels first. Where nothing is random and they fit, that is done once."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.from_timm = is_timm(config.model)
        self.column = find_image(self.data.features, config.input_columns)
        self.channels = self._find_channels()
        if self.from_timm:
            self.model_args = self._timm_arguments()
        else:
            self.model_config = self._transformers_config()
        self.look = self._find_look()
        self.test_transform = create_transform(self.shape, **self.look)
        self.train_transform = augmented(config.augment, self.test_transform, self.shape, self.look)
        self.train = self._examples(self.data.train, training=True)
        self.test = self._examples(self.data.test, training=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.channels, self.config.image_size, self.config.image_size)

    # -- the data

    def _find_channels(self) -> int:
        """One if images are grey. Looking at some of them is enough, from all over: they may be sorted by class."""
        count = len(self.data.test)
        some = self.data.test.select(np.linspace(0, count - 1, min(32, count), dtype=int))
        try:
            modes = {image.mode for image in some.cast_column(self.column, datasets.Image())[self.column]}
        except Exception as error:  # whatever the decoder of the file's format raises, and missing images
            raise RunError(f"the column '{self.column}' holds no readable images: {first_line(error)}") from error
        return 1 if modes <= set(GREY) else 3

    def _find_look(self) -> dict[str, Any]:
        """How images are scaled: as a pretrained model is used to; for a new one, all of it, to about -1 to 1."""
        look: dict[str, Any] = {"mean": (0.5,), "std": (0.5,), "interpolation": "bilinear"}
        look |= {"crop_pct": 1.0, "crop_mode": "squash"}
        if self.config.pretrained and self.from_timm:
            look = {key: getattr(self.about.pretrained, key) for key in look}
        elif self.config.pretrained:
            look |= pretrained_look(self.config.model)
        for key in ("mean", "std"):
            if len(look[key]) != self.channels:
                look[key] = (sum(look[key]) / len(look[key]),) * self.channels
        return look

    def _examples(self, part: Any, training: bool) -> Any:
        # decoding is left to `_example`, so that a stream's rows are decoded by the process that keeps them
        part = part.select_columns([self.column, self.data.label])
        part = part.cast_column(self.column, datasets.Image(decode=False))
        if isinstance(part, datasets.IterableDataset):
            return Stream(part, self.config)
        channels, height, width = self.shape
        small = len(part) * channels * height * width * 4 < IN_MEMORY
        if small and not (training and self.config.augment):
            images, labels = zip(*(self.test_example(row) for row in part), strict=True)
            return TensorDataset(torch.stack(images), torch.tensor(labels))
        if training:
            return Examples(part, self.train_example, self.config.seed)
        return Mapped(part, self.test_example)

    def train_example(self, row: dict[str, Any]) -> tuple[Tensor, int]:
        return self._example(row, self.train_transform)

    def test_example(self, row: dict[str, Any]) -> tuple[Tensor, int]:
        return self._example(row, self.test_transform)

    def _example(self, row: dict[str, Any], transform: Any) -> tuple[Tensor, int]:
        try:
            image: PIL.Image.Image = datasets.Image().decode_example(row[self.column])
            image = eight_bits(image).convert("L" if self.channels == 1 else "RGB")
        except Exception as error:  # whatever the decoder of the file's format raises
            path = (row[self.column] or {}).get("path")
            where = f"{path}, in" if path else "an image in"
            raise RunError(f"{where} the column '{self.column}', cannot be read: {first_line(error)}") from error
        return transform(image), self.classes.number(row[self.data.label])

    def collate(self, examples: list) -> Batch:
        return default_collate(finish_rows(examples, self.train_example, self.config.seed))

    # -- the model

    def _timm_arguments(self) -> dict[str, Any]:
        config = self.config
        self.about = TimmModel.called(config.model)
        if config.pretrained and not self.about.pretrained.has_weights:
            raise RunError(f"timm has no pretrained weights for {config.model}; leave out pretrained")
        check_sizes(config, num_classes=len(self.classes.names))
        self.channels = config.model_args.get("in_chans", self.channels)
        if self.channels not in (1, 3):
            raise RunError(f"model_args: in_chans is 1 for grey images or 3 for colours, not {self.channels!r}")
        size = {"img_size": config.image_size} if self.about.pretrained.fixed_input_size else {}
        return {"num_classes": len(self.classes.names), "in_chans": self.channels, **size, **config.model_args}

    def _transformers_config(self) -> Any:
        config = self.config
        check_sizes(config, num_labels=len(self.classes.names))
        made = transformers_config(config, **named_classes(self.classes.names))
        if config.pretrained:
            self.channels = made.num_channels
            if getattr(made, "image_size", config.image_size) != config.image_size:
                raise RunError(f"{config.model} takes images of {made.image_size} pixels; give that image_size")
        else:
            made.num_channels, made.image_size = self.channels, config.image_size
        return made

    def make_model(self) -> nn.Module:
        if self.from_timm:
            model = make_timm(self.config, self.model_args)
        else:
            model = make_transformers("AutoModelForImageClassification", self.config, self.model_config)
        if is_whole(model):
            self._try(model)
        return model

    def _try(self, model: nn.Module) -> None:
        """Many networks say only when they are used that images are too small for them."""
        batch = self.collate([self.test[0]])
        images = " x ".join(map(str, self.shape))
        problem = f"{self.config.model} does not take images of {images}; give another image_size, model or model_args"
        with on_trial(model, problem):
            logits, _ = self.predict(model, batch)
        if logits.shape != (1, len(self.classes.names)):
            raise RunError(
                f"{self.config.model} makes {tuple(logits.shape[1:])} numbers of an image, "
                f"and not one for each of {len(self.classes.names)} classes; give another model or model_args"
            )

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images, labels = batch
        images = in_precision_of(model, images)
        if self.config.channels_last:
            # of the images alone: convolutions pass it on, and weights stay as engines and files know them
            images = images.to(memory_format=torch.channels_last)
        return (model(images) if self.from_timm else model(pixel_values=images).logits), labels

    def save_model(self, model: nn.Module, state: dict[str, Tensor], folder: Path) -> list[Path]:
        if not self.from_timm:
            return save_transformers(model, state, folder, new_image_processor(self))
        description = {
            "architecture": self.about.architecture,
            "arguments": {**self.about.arguments, **self.model_args},
            "classes": self.classes.names,
            "input": {"size": self.shape, **self.look},
        }
        return save_timm(state, folder, description)


class Mapped(Dataset):
    """Examples made as they are asked for, with nothing random about them."""

    def __init__(self, source: Any, transform: Any) -> None:
        self.source = source
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.source[index])


def eight_bits(image: PIL.Image.Image) -> PIL.Image.Image:
    """Grey as Pillow converts it to 8 bits without loss: of itself it makes 255 of all that is more."""
    if image.mode not in ("I", "F", *GREY_16):
        return image
    values = np.asarray(image)
    if image.mode in GREY_16 or (image.mode == "I" and image.format in ("PNG", "PPM")):  # these files have 16 bits
        return PIL.Image.fromarray((values // 256).astype(np.uint8))
    low, high = values.min(), values.max()
    if image.mode == "F" or low < 0 or high > 255:
        raise ValueError(f"its grey goes from {low} to {high}, and what is white is not known; save it as 8 or 16 bits")
    return image


def pretrained_look(name: str) -> dict[str, Any]:
    """What a pretrained model of transformers is used to, but for sizes and crops: image_size says those."""
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(name)
        interpolation = PIL.Image.Resampling(processor.resample).name.lower()
        return {"mean": processor.image_mean, "std": processor.image_std, "interpolation": interpolation}
    except Exception as error:  # no file, no network, a processor of another kind, ...
        raise RunError(f"how {name} wants its images is not known: {first_line(error)}") from error


def new_image_processor(task: ImageClassification) -> Any:
    """What transformers needs to prepare images as this task does."""
    from transformers import ViTImageProcessor

    return ViTImageProcessor(
        size={"height": task.config.image_size, "width": task.config.image_size},
        resample=PIL.Image.Resampling[task.look["interpolation"].upper()],
        image_mean=list(task.look["mean"]),
        image_std=list(task.look["std"]),
        do_convert_rgb=task.channels == 3,
    )
