"""Train a model with BinMask: accelerate launch launch/train.py --help"""

from binmask_dist.training.config import parse_config

if __name__ == "__main__":
    config = parse_config()

    # imported only now, because it takes seconds: --help and mistakes are answered first
    from binmask_dist.training.main import main

    main(config)
