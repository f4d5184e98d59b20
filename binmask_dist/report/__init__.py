"""Tables, figures and one page from many trials: python -m binmask_dist.report --help"""
