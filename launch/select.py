"""Choose features with BinMask: accelerate launch launch/select.py --help"""

from binmask_dist.selection.config import parse_select_config

if __name__ == "__main__":
    config = parse_select_config()

    # imported only now, because it takes seconds: --help and mistakes are answered first
    from binmask_dist.selection.main import main

    main(config)
