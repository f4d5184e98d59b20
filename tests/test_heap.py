"""Memory that a step frees is kept for the next one."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import sys

from binmask_dist.training.heap import keep_freed_memory

def use():
    block = bytearray(64 * 2**20)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = keep_freed_memory()
use()
before = faults()
for _ in range(20):
    use()
print(kept, faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in ways of their own")
@pytest.mark.parametrize("wish", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_what_was_freed_is_not_faulted_in_again(wish):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    told = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**environment, **wish}, capture_output=True, text=True, check=True
    )
    kept, faults = told.stdout.split()
    assert kept == str(not wish)
    pages_of_a_block = 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    if wish:  # as the environment says: every block anew, in huge pages at most
        assert int(faults) > 20 * pages_of_a_block // 512 // 2
    else:
        assert int(faults) < 20
