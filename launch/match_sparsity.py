"""Another method at BinMask's own sparsities: python launch/match_sparsity.py --help"""

from binmask_dist.sweeps.matching import main

if __name__ == "__main__":
    main()
