"""Every method on two real ranks. Starting them costs ten seconds, so one start serves all tests."""

import json

import pytest
from ranks import run_two_ranks

from binmask_dist.baselines import METHODS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baselines")
    run_two_ranks("baselines.py", folder)
    return json.loads((folder / "baselines.json").read_text())


@pytest.mark.parametrize("name", METHODS)
def test_masks_are_the_same_on_every_rank_and_those_of_one_process(results, name):
    result = results[name]
    assert result["same_products"]  # of the gates that were drawn for the next pass, too
    assert result["same_masks"]
    assert result["masks_differ_from_one_process"] <= 2  # gradients are added up in another order
    assert result["error_from_one_process"] < 1e-3
    if name in ("probmask", "magnitude", "rigl"):
        assert result["sparsity"] == pytest.approx(0.7, abs=1e-3)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
@pytest.mark.parametrize("name", ["dense", "l1", "l2"])
def test_methods_without_masks_run_where_weights_are_cut_up(results, name, engine):
    assert results[f"{name}-{engine}"]["error_from_one_process"] < 1e-6
    assert results[f"{name}-{engine}"]["sparsity"] == 0.0
