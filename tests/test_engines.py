"""Two real ranks under DDP, FSDP2 and ZeRO-1, 2, 3. Starting them costs ten seconds, so one start serves all tests."""

import json
from pathlib import Path

import pytest
import torch
from ranks import averages, run_two_ranks, work
from ranks.work import CASES, ENGINES, MIDDLE, Case

import binmask_dist
from binmask_dist.training.averaging import Average


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the two ranks have left their results, beside a checkpoint of one process that they have read."""
    folder = tmp_path_factory.mktemp("ranks")
    _, binmask = work.single_process(Case("ddp"), stop=MIDDLE)
    binmask_dist.save_checkpoint(folder / "single", binmask, extra={"step": MIDDLE})
    _, _, average = averages.single_process(MIDDLE)
    average.save(folder / "average-single", work.make_accelerator(Case("single")))
    run_two_ranks("engines.py", folder)
    return folder


def results(folder: Path, job: str) -> dict:
    return json.loads((folder / f"{job}.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_masks_are_those_of_one_process(folder, case):
    result = results(folder, "matrix")[str(case)]
    assert result["masks_differ_from_twin"] == 0
    assert result["error_from_twin"] < 1e-6
    assert result["zeros_where_masked"]
    assert result["flips"][0] > 2000
    assert result["flips"][1] > 100
    if case.precision == "no":
        assert result["masks_differ"] == 0
        assert result["error"] < 1e-6
        assert result["sparsity"] == result["expected_sparsity"]
        assert result["layer_sparsity"] == result["expected_layer_sparsity"]
        assert result["flips"] == result["expected_flips"]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_save_state_resumes_bit_for_bit_in_the_middle_of_an_epoch(folder, engine, precision):
    result = results(folder, "resume")[f"{engine}-{precision}"]
    assert result["differs"] == []
    assert result["flips_equal"]


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", (*ENGINES, "single"))
def test_a_checkpoint_of_any_engine_loads_under_any_other(folder, source, target):
    result = results(folder, "checkpoints")[f"{source}-to-{target}"]
    assert result["extra"] == {"step": MIDDLE}
    assert result["weights_equal"]
    assert result["masks_equal"]
    assert result["flips_equal"]
    assert result["masks_differ_at_the_end"] == 0


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ["single", "zero3"])
def test_frozen_weights_and_masks_that_never_learnt_are_kept(folder, source, target):
    """ZeRO has one number of steps for a partition, in which masks that have learnt lie beside others."""
    result = results(folder, "mixtures")[f"{source}-to-{target}"]
    assert result["masks_equal"]
    assert result["weights_equal"]
    assert result["sparsity"] > 0.4


@pytest.mark.parametrize("source", ENGINES)
def test_a_checkpoint_of_two_ranks_loads_on_one_process(folder, source):
    """And training goes on to the masks that one process, never interrupted, ends with."""
    model, binmask = work.build(Case("ddp"))
    assert binmask_dist.load_checkpoint(folder / source, binmask) == {"step": MIDDLE}
    _, expected = work.single_process(Case("ddp"), stop=MIDDLE)
    for name, mask in expected.masks().items():
        assert torch.equal(mask, binmask.masks()[name])
    work.continue_single_process(Case("ddp"), model, binmask, start=MIDDLE)
    _, expected = work.single_process(Case("ddp"))
    for name, mask in expected.masks().items():
        assert torch.equal(mask, binmask.masks()[name])


@pytest.mark.parametrize("case", averages.CASES)
def test_an_average_takes_the_place_of_the_weights_and_leaves_it(folder, case):
    result = results(folder, "averages")[case]
    assert result["wrong_inside"] == result["nonzero_where_masked"] == result["changed_outside"] == []
    assert result["masked_by_us"] > 100
    assert result["output_moved"] > 0.1 > 0.01 > result["output_error"]
    assert result["output_as_before"]
    assert result["saved"] == 11
    assert result["wrong_in_file"] == []
    if "bf16" not in case:
        assert result["error"] < 1e-6
        assert result["masks_differ"] == 0


@pytest.mark.parametrize("case", [case for case in averages.CASES if "zero3" in case])
def test_what_zero3_keeps_gathered_is_the_average_too(folder, case):
    result = results(folder, "averages")[case]
    assert 0 < len(result["persisted"]) < 11
    for gathered in result["gathered"]:
        assert set(result["persisted"]) <= gathered.keys()
        assert all(gathered.values())
    assert (
        "'first.weight' has shape (0,) and not (61, 12); give a copy of the same model (under ZeRO-3" in result["copy"]
    )


@pytest.mark.parametrize("case", averages.CASES)
def test_a_saved_average_goes_on_bit_for_bit(folder, case):
    result = results(folder, "averages")[case]
    assert result["differs_when_loaded"] == result["differs_when_resumed"] == []
    if "bf16" not in case:
        assert result["reads_one_process"]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_average_of_two_ranks_loads_on_one_process(folder, engine):
    """With the checkpoint that it lies in."""
    model, binmask = work.build_frozen()
    average = Average(model, averages.DECAY)
    binmask_dist.load_checkpoint(folder / f"average-{engine}", binmask)
    average.load(folder / f"average-{engine}")
    _, single, expected = averages.single_process(MIDDLE)
    for name, mask in single.masks().items():
        assert torch.equal(mask, binmask.masks()[name])
    for name, value in expected.averages.items():
        torch.testing.assert_close(average.averages[name], value, rtol=0, atol=1e-6)
    with average.applied(model, binmask):
        for name, mask in binmask.masks().items():
            assert not model.get_parameter(name)[~mask].any()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_saved_file_is_as_sparse_as_the_masks_say(folder, engine):
    result = results(folder, "exports")[engine]
    assert result["from_file"] == result["live"] > 0.5


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine.startswith("zero")])
def test_nothing_is_clipped_unless_asked_for(folder, engine):
    """Left alone, Accelerate and DeepSpeed would make it 1.0."""
    assert results(folder, "exports")[engine]["clips_by_itself"] == 0.0


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_that_would_not_take_place_is_refused(folder, engine):
    """DeepSpeed has stepped before an ordinary loop asks for it."""
    none, some = results(folder, "exports")[engine]["asked_to_clip"]
    assert none == ""
    assert some.startswith("DeepSpeed clips by itself") == engine.startswith("zero")


@pytest.mark.parametrize("engine", ENGINES)
def test_no_more_bytes_on_the_wire_than_dense_training(folder, engine):
    sent = results(folder, "wire")[engine]
    assert sent["dense"] > 5e7
    assert sent["binmask"] / sent["dense"] == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_compiled_step_and_compiled_model(folder, engine):
    result = results(folder, "compiled")[engine]
    assert result["compiled"]
    assert result["masks_differ"] == 0
    assert result["flips"] > 2000


@pytest.mark.parametrize("engine", ENGINES)
def test_masks_are_settled_at_a_sparsity_over_all_ranks(folder, engine):
    result = results(folder, "settled")[engine]
    assert result["before"] > 0.4
    assert result["after"] == pytest.approx(0.3, abs=2e-4)  # of 3,000 masks
    assert result["masks_differ"] == 0
    assert result["zeros_where_masked"]
    assert result["weights_where_not"] > 0.99
    assert result["flips_equal"]


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_on_one_rank_changes_nothing_on_any(folder, engine):
    result = results(folder, "faults")[f"nan-{engine}"]
    assert result["skipped"] == 1
    assert result["changed"] == []
    assert result["sparsity"] == results(folder, "matrix")[f"{engine}-fp32-accumulate1"]["sparsity"]


def test_ranks_that_drift_apart_are_named(folder):
    assert "ranks [0, 1] disagree on third.weight" in results(folder, "faults")["drift"]
    assert "disagree on the settings of group" in results(folder, "faults")["epochs"]
