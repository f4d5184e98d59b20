"""What an epoch's record says of the masks: counted by hand here, and the same on two ranks of every engine."""

import json

import numpy as np
import pytest
import torch
from ranks import run_two_ranks, work
from ranks.work import ENGINES, MIDDLE, Case
from torch import nn

import binmask_dist
from binmask_dist.method import readout
from binmask_dist.training.tracking import flips_so_far, mask_record


def latents(binmask: binmask_dist.BinMask) -> np.ndarray:
    params = [param for group in binmask.masked_groups for param in group["params"]]
    return torch.cat([binmask.state[param]["latent"].reshape(-1) for param in params]).numpy()


def trained_halves() -> tuple[binmask_dist.BinMask, dict[str, int]]:
    model, binmask = work.single_process(Case("ddp"), stop=MIDDLE - 5)
    before = flips_so_far(binmask)
    work.continue_single_process(Case("ddp"), model, binmask, start=MIDDLE - 5, stop=MIDDLE)
    return binmask, before


def test_the_record_is_what_can_be_counted_by_hand() -> None:
    binmask, before = trained_halves()
    record, values = mask_record(binmask, before), latents(binmask)
    histogram = record["latent_histogram"]
    counts, edges = np.histogram(values, bins=np.array(histogram["edges"], dtype=np.float32))
    assert histogram["counts"] == counts.tolist()
    assert edges == pytest.approx(np.linspace(-1, 1, 65))
    assert sum(histogram["counts"][:32]) == np.count_nonzero(values < 0)  # an edge at zero: the first half is off
    assert record["sparsity"] == np.mean(values < 0) > 0.1
    assert 0 < record["near_zero"] < len(values)
    assert record["near_zero"] == np.count_nonzero(np.abs(values) <= np.float32(10 * record["mask_lr"]))
    assert record["near_zero_fraction"] == record["near_zero"] / len(values)
    assert record["on_to_off"] == binmask.flips().on_to_off - before["on_to_off"] > 0
    assert record["returns"] == record["off_to_on"]
    assert (record["lam"], record["frozen"]) == (work.MASK["lam"], False)
    assert json.dumps(record)


def test_masks_that_do_not_learn_have_no_rate() -> None:
    binmask, before = trained_halves()
    binmask.freeze()
    record = mask_record(binmask, before)
    assert (record["mask_lr"], record["near_zero"], record["frozen"]) == (0.0, 0, True)


def test_latents_that_do_not_exist_yet_are_where_they_will_start() -> None:
    model = nn.Linear(10, 10)
    with torch.no_grad():
        model.weight[:3] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    binmask = binmask_dist.patch(model, optimizer, lam=1e-3, epochs=3, alpha0=0.3, from_zeros=True)
    counts, edges = binmask.latent_histogram(bins=20)
    assert {round(edges[index], 2): count for index, count in enumerate(counts) if count} == {-1.0: 30, 0.3: 70}


def test_counting_in_parts_is_counting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    binmask, _ = trained_halves()
    at_once = binmask.latent_histogram()
    monkeypatch.setattr(readout, "COUNTED_AT_ONCE", 100)
    assert binmask.latent_histogram() == at_once
    assert sum(readout.latent_histogram(binmask, [-0.1, 0.0, 0.1])) < sum(at_once[0])  # others lie outside


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("ranks")
    run_two_ranks("latents.py", folder)
    return json.loads((folder / "latents.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_say_what_one_process_says(two_ranks: dict, engine: str) -> None:
    """No padding of a ZeRO partition is counted, and no replica twice."""
    binmask, before = trained_halves()
    expected, record = mask_record(binmask, before), two_ranks[engine]["record"]
    assert sum(two_ranks[engine]["untrained"]) == sum(record["latent_histogram"]["counts"])
    assert max(two_ranks[engine]["untrained"]) == sum(two_ranks[engine]["untrained"])
    moved = np.abs(np.subtract(record["latent_histogram"]["counts"], expected["latent_histogram"]["counts"])).sum()
    assert moved <= 4  # latents on an edge: gradients are added up in another order
    assert abs(record["near_zero"] - expected["near_zero"]) <= 2
    for key in ("sparsity", "layer_sparsity", "on_to_off", "off_to_on", "mask_lr", "lam"):
        assert record[key] == expected[key]
