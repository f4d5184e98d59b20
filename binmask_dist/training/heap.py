"""Keep the memory that a step frees for the next step, where tensors live in the heap of the C library.

glibc gives large blocks back to the system as soon as they are free, and the next step faults them in again, page by
page: a tenth of the time of a small network's step. Devices other than the CPU keep what is freed by themselves.
"""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
ALWAYS_KEEP = 2**31 - 1  # bytes; the largest that an int says
FROM_THE_HEAP = 2**30  # larger blocks, such as whole data sets, are still mapped one by one, and given back
SAID_BY_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Whether that is done from now on: under glibc, unless the environment has other wishes."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in SAID_BY_THE_USER):
        return False
    set_option = ctypes.CDLL(None).mallopt
    return bool(set_option(M_MMAP_THRESHOLD, FROM_THE_HEAP)) and bool(set_option(M_TRIM_THRESHOLD, ALWAYS_KEEP))
