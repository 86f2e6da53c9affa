"""Two LoRA adapters for the tiny model, with random weights. Runs in vLLM's Python: `python vllm_adapters.py DIRECTORY`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, RANK = 4, 256, 8
WIDTHS = {"q_proj": 256, "v_proj": 128}


def write(out: Path, seed: int) -> None:
    out.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(WIDTHS),
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, width in WIDTHS.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=rng)
            weights[f"{key}.lora_B.weight"] = torch.randn(width, RANK, generator=rng) * 0.1
    save_file(weights, out / "adapter_model.safetensors")


if __name__ == "__main__":
    for number, adapter in enumerate(("one", "two")):
        write(Path(sys.argv[1]) / adapter, number)
