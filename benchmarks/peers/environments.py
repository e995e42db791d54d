"""The environments of the other libraries, each with pinned packages."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEFAULT = Path("outputs", "peers")


def python_of(requirements: str, folder: Path) -> Path:
    """Return the Python of an environment with these requirements, made at the first time.

    Args:
        requirements: a file in this folder, which also names the environment.
        folder: where the environments are.
    """
    environment = folder / requirements.removesuffix(".txt")
    if not (environment / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin/pip", "install", "--quiet", "-r", HERE / requirements],
                       check=True)
        (environment / "ready").touch()
    return environment / "bin/python"


def ours() -> dict[str, str]:
    """Return the environment variables with which any Python finds this repository and its torch.

    So a library that runs our own programs needs nothing in its environment but itself.
    """
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{sysconfig.get_path('platlib')}"}
