"""Overlay: the Python of a vLLM release over the compiled CPU kernels of an older one, to run it where it has no CPU build.

    python tools/vllm_overlay.py --base .venv-vllm --to .venv-vllm33 --requirements requirements/vllm33.txt
    python tools/vllm_overlay.py --base .venv-vllm --to build/vllm-next --wheel vllm-0.34.0-....whl

Makes TO/bin/python, an interpreter like any other: for `--python` of `backhaul up`, and for BACKHAUL_VLLM_PYTHON of the
tests. It runs what BASE has installed, this package included, with TO's vLLM before BASE's. Kernels of another release
need not fit; that vLLM can be imported is tried at the end, and more than that the tests must say.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

KERNELS = ("_C*.so", "fs_io_C*.so", "spinloop*.so")
"""What of the CPU build is compiled."""


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--base", type=Path, required=True, help="an environment with vLLM's CPU build")
    args.add_argument("--to", type=Path, required=True, help="the folder to make; what it had is replaced")
    which = args.add_mutually_exclusive_group(required=True)
    which.add_argument("--wheel", help="a wheel of vLLM: a file, or a requirement such as vllm==0.34.0")
    which.add_argument("--requirements", type=Path, help="vLLM, and what else it needs, pinned")
    options = args.parse_args()
    wanted = ["-r", str(options.requirements)] if options.requirements else [options.wheel]
    overlay(options.base.resolve(), options.to.resolve(), wanted)


def overlay(base: Path, to: Path, wanted: list[str]) -> None:
    """`wanted` is for pip. Raises `subprocess.CalledProcessError` where pip fails or vLLM cannot be imported."""
    python = base / "bin" / "python"
    packages = to / "packages"
    shutil.rmtree(to, ignore_errors=True)
    packages.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=to) as wheels:
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", wheels, *wanted], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            unpack(wheel, packages)
    asked = "import sysconfig; print(sysconfig.get_path('platlib'))"
    site = Path(subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip())
    for pattern in KERNELS:
        for kernel in (site / "vllm").glob(pattern):
            shutil.copy(kernel, packages / "vllm")
    interpreter = to / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.write_text(
        "#!/bin/sh\n"
        f"export VLLM_TARGET_DEVICE=cpu PYTHONPATH={shlex.quote(str(packages))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        f'exec {shlex.quote(str(python))} "$@"\n'
    )
    interpreter.chmod(0o755)
    subprocess.run([interpreter, "-c", "import vllm; print('vLLM', vllm.__version__)"], check=True)


def unpack(wheel: Path, to: Path) -> None:
    """vLLM's own libraries are left out: they are CUDA's, and hundreds of megabytes."""
    is_vllm = wheel.name.startswith("vllm-")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not (is_vllm and name.endswith(".so"))]
        archive.extractall(to, [name for name in names if not name.partition("/")[0].endswith(".data")])


if __name__ == "__main__":
    sys.exit(main())
