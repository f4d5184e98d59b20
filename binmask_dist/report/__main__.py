"""python -m binmask_dist.report"""

from binmask_dist.report.main import main

if __name__ == "__main__":
    main()
