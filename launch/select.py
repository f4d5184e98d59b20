"""Choose features with BinMask: accelerate launch launch/select.py --help"""

import sys

if __name__ != "__main__":
    # A script's own folder comes first on the path, so that `import select` of the standard library, which torch needs,
    # finds this file: hand over to the module that was meant.
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("select", [entry for entry in sys.path if entry != __file__.rpartition("/")[0]])
    sys.modules["select"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["select"])
else:
    from binmask_dist.selection.config import parse_select_config

    config = parse_select_config()

    # imported only now, because it takes seconds: --help and mistakes are answered first
    from binmask_dist.selection.main import main

    main(config)
