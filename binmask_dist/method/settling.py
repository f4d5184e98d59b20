"""Masks are put on or off by the rank of their latents, so that as many are off as were asked for.

The threshold that tells on from off is zero. Here it is moved to where it has the right number of latents below it, and
the latents between the two are sent to the other side. Those that lie on it together are drawn by lot: the latents of
weights that never get a gradient stay equal for ever.
"""

import warnings
from typing import TYPE_CHECKING

import torch

from binmask_dist.method import kernels
from binmask_dist.method.layout import Placement, local_part, placements, reshard, sum_over_ranks

if TYPE_CHECKING:
    from binmask_dist.method.optimizer import BinMask

HALVINGS = 40  # more than a latent has bits


@torch.no_grad()
def settle(binmask: "BinMask", sparsity: float) -> None:
    """Of masks that have learnt; one is put off only if its latent has come nearer to zero. Collective."""
    groups = [group for group in binmask.masked_groups if not group.get("fixed")]
    if not groups:
        raise ValueError("only inputs are masked here, and settle is for weights; see smoothed_masks")
    group, where = groups[0], placements(groups, binmask.model)
    wanted = round(sparsity * sum(place.shape.numel() for place in where.values()))
    low, high = -group["alpha1"], group["alpha0"]  # at most `wanted` lie below low; more below high, if it can be had
    available = _count_below(binmask, where, high)
    if available < wanted:
        warnings.warn(
            f"{wanted:,} masks were to be off, and only {available:,} have begun to go off: the others stay on; "
            "train longer, or with a larger mask_lr, before settle",
            stacklevel=4,
        )
    if available <= wanted:
        low = high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _count_below(binmask, where, middle) <= wanted:
            low = middle
        else:
            high = middle
    below, between = _count_below(binmask, where, low), _count_below(binmask, where, high)
    share = (wanted - below) / max(1, between - below)
    distance = group["alpha0"] or group["alpha1"]  # from zero, to which nothing but learning brings them back
    lots = torch.Generator().manual_seed(0)  # the same on ranks that hold the same
    for place in where.values():
        if _has_learnt(binmask, place):
            state = binmask.state[place.holder]
            latent = place.local(state["latent"])
            drawn = torch.rand(latent.shape, generator=lots).to(latent.device) < share
            off = (latent < low) | ((latent < high) & drawn)
            flipped = off == (latent >= 0)
            latent.copy_(torch.where(flipped, torch.where(off, -distance, distance), latent))
            local_part(state["flips"])[0] += torch.count_nonzero(flipped)
    if binmask.model is not None:
        reshard(binmask.model)
    holders = {id(place.holder): place.holder for place in where.values() if _has_learnt(binmask, place)}
    rows = [
        (local_part(holder.detach()), *(local_part(binmask.state[holder][key]) for key in ("weight", "latent")))
        for holder in holders.values()
    ]
    kernels.product_(rows, group["compile"])


def _has_learnt(binmask: "BinMask", place: Placement) -> bool:
    return place.holder is not None and float(binmask.state.get(place.holder, {}).get("latent_step", 0)) > 0


def _count_below(binmask: "BinMask", where: dict[str, Placement], limit: float) -> int:
    counts = {}
    for name, place in where.items():
        counts[name] = torch.zeros((), dtype=torch.int64, device=place.device)
        if _has_learnt(binmask, place):
            latent = place.local(binmask.state[place.holder]["latent"])
            counts[name] += torch.count_nonzero(latent < limit).to(place.device)
    return sum(map(int, sum_over_ranks(counts, where).values()))
