"""Random changes of training images: the protocols of small images, and timm's policies by their names."""

import re
from typing import Any

import PIL.Image
from timm.data import auto_augment, create_transform
from torchvision import transforms

from binmask_dist.training.tasks.base import RunError

# of what else a section is called timm takes no notice
POLICY = re.compile(r"(rand|augmix|v0r?|originalr?|3a)(-(t(weights|3aw?)|(?!t)[a-z]+\d+(\.\d+)?))*")


def augmented(name: str, plain: Any, shape: tuple[int, int, int], look: dict[str, Any]) -> Any:
    """The transform that was asked for; `plain` is the one without anything random."""
    if not name:
        return plain
    if name in ("flip", "crop"):
        *resize, to_tensor, normalise = plain.transforms
        crop = [transforms.RandomCrop(shape[1:], padding=4)] if name == "crop" else []
        return transforms.Compose([*resize, *crop, transforms.RandomHorizontalFlip(), to_tensor, normalise])
    try:
        if not POLICY.fullmatch(name):
            raise ValueError(name)
        return create_transform(shape, is_training=True, auto_augment=name, **look)
    except (AssertionError, KeyError, ValueError) as error:
        raise RunError(
            f"augment '{name}' is unknown; take flip, crop, or a policy of timm's such as rand-m9-mstd0.5"
        ) from error


def posterize(image: PIL.Image.Image, bits_to_keep: int, **settings: Any) -> PIL.Image.Image:
    """timm's strongest keeps no bit, which Pillow refuses: nothing is left of the image then."""
    if bits_to_keep == 0:
        return PIL.Image.new(image.mode, image.size)
    return timm_posterize(image, bits_to_keep, **settings)


timm_posterize = auto_augment.posterize
for operation, function in auto_augment.NAME_TO_OP.items():
    if function is timm_posterize:
        auto_augment.NAME_TO_OP[operation] = posterize
