"""Feature selection on two ranks, by the command and by the estimator. Rank 0 writes what it chose."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from binmask_dist import BinMaskSelector, make_accelerator
from binmask_dist.selection.config import parse_select_config
from binmask_dist.selection.main import select

folder = Path(sys.argv[1])
accelerator = make_accelerator()
assert accelerator.num_processes == 2
arguments = json.loads((folder / "arguments.json").read_text())
select(parse_select_config([*arguments, f"--run_root={folder}", "--name=two"]), accelerator)

table = np.load(folder / "table.npz")
estimator = BinMaskSelector(**json.loads((folder / "estimator.json").read_text()))
estimator.fit(table["x"], table["y"])
masks = [torch.zeros(len(estimator.smoothed_mask_)) for _ in range(2)]
torch.distributed.all_gather(masks, torch.from_numpy(estimator.smoothed_mask_))
assert torch.equal(*masks)
if accelerator.is_main_process:
    np.save(folder / "estimator.npy", estimator.smoothed_mask_)
accelerator.end_training()
