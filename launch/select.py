"""Choose features with BinMask: accelerate launch launch/select.py --help"""

import os
import sys

if __name__ != "__main__":
    # A script's own folder comes first on the path, so that `import select` of the standard library, which torch needs,
    # finds this file: hand over to the module that was meant. Debuggers and profilers name the folder by another path.
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("select", [entry for entry in sys.path if os.path.abspath(entry) != here])
    sys.modules["select"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["select"])
else:
    from binmask_dist.selection.config import parse_select_config

    config = parse_select_config()

    # imported only now, because it takes seconds: --help and mistakes are answered first
    from binmask_dist.selection.main import main

    main(config)
