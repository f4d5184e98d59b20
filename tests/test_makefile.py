"""What the Makefile takes as installed. (The install itself is what every test here has run after.)"""

import os
import shutil
import subprocess
from pathlib import Path

from jobs import ROOT


def is_installed(folder: Path) -> bool:
    done = subprocess.run(["make", "--question", "install"], cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def test_an_environment_is_used_again_unless_pyproject_changed(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    assert not is_installed(tmp_path)
    stamp = tmp_path / ".venv" / ".installed"
    stamp.parent.mkdir()
    stamp.touch()
    os.utime(tmp_path / "pyproject.toml", (0, 0))
    assert is_installed(tmp_path)
    os.utime(stamp, (0, 0))
    (tmp_path / "pyproject.toml").touch()
    assert not is_installed(tmp_path)
