"""Run by torchrun on two ranks: what a record says of the masks under every engine, after some epochs of training."""

import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from binmask_dist.training.tracking import flips_so_far, mask_record
from ranks import work
from ranks.work import ENGINES, MIDDLE, Case


def main(folder: Path) -> None:
    results = {}
    for engine in ENGINES:
        case = Case(engine)
        accelerator = work.make_accelerator(case)
        model, optimizer, binmask = work.prepared(case, accelerator)
        untrained = binmask.latent_histogram(bins=20)[0]
        work.train(case, accelerator, model, optimizer, binmask, stop=MIDDLE - 5)
        before = flips_so_far(binmask)
        work.train(case, accelerator, model, optimizer, binmask, start=MIDDLE - 5, stop=MIDDLE)
        results[engine] = {"untrained": untrained, "record": mask_record(binmask, before)}
    if work.is_first_rank():
        (folder / "latents.json").write_text(json.dumps(results))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        raise
    work.leave()
