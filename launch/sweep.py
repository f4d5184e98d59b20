"""Run the trials of a W&B sweep file here, without a server: python launch/sweep.py configs/sweeps/digits.yaml"""

import sys

from binmask_dist.sweeps.main import main, parse_sweep

if __name__ == "__main__":
    sys.exit(main(parse_sweep()))
