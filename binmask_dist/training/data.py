"""Image data: Hugging Face data sets, made into tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from sklearn.datasets import load_digits
from timm.data import create_transform
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class ImageData:
    """Two sets of (image, label): a float tensor with the channels first, and a class number."""

    train: TensorDataset
    test: TensorDataset
    channels: int
    classes: int


def digits() -> DatasetDict:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 grey. The same fifth of every digit is always the test set."""
    source = load_digits()
    names = [str(name) for name in source.target_names]
    data = Dataset.from_dict(
        {"image": list((source.images * 255 / 16).astype(np.uint8)), "label": source.target},
        features=Features({"image": Image(), "label": ClassLabel(names=names)}),
    )
    return data.train_test_split(test_size=0.2, stratify_by_column="label", seed=0)


def load_images(image_size: int) -> ImageData:
    """Decode, resize and normalise once: there is nothing random in it, and the set fits in memory."""
    parts = digits()
    channels = 1
    transform = create_transform(
        (channels, image_size, image_size), crop_pct=1.0, mean=(0.5,) * channels, std=(0.5,) * channels
    )
    tensors = {
        name: TensorDataset(torch.stack([transform(image) for image in part["image"]]), torch.tensor(part["label"][:]))
        for name, part in parts.items()
    }
    classes = parts["train"].features["label"].num_classes
    return ImageData(tensors["train"], tensors["test"], channels, classes)
