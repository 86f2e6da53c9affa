"""Command-line options generated from a dataclass: each field that is annotated with its help is an option.

    seconds: Annotated[Count, "S", "for each line"] = 10     # --seconds S   for each line (default: 10)

Beside the field's type `Annotated` has a help text, a name for the value before it where the type's own will not do, a function
that reads the value, and words for `add_argument`. A field without a default is required.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_METAVARS = {int: "N", float: "S", Path: "FILE", tuple: "N,N,..."}
PASSED_ON = "vllm_args"
"""The field that takes what follows `--`."""


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a number of 1 or more")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers with commas between, such as 512,1024") from None


def new_file(text: str) -> Path:
    """Refused before minutes of measuring, not after them."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no file can be written there")
    return path


Count = Annotated[int, count]
Numbers = Annotated[tuple[int, ...], numbers]
NewFile = Annotated[Path, new_file]


def add_arguments(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Declares the options of a dataclass."""
    hints = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        kind, said = _read(hints[field.name])
        if field.name == PASSED_ON:
            parser.usage = "%(prog)s [options] [-- vLLM flags for every engine]"
        if texts := [one for one in said if isinstance(one, str)]:
            words = _words(field, kind, texts, [one for one in said if callable(one)])
            for more in said:
                words |= more if isinstance(more, dict) else {}
            parser.add_argument(f"--{field.name.replace('_', '-')}", **words)


def options_from(options: type[_T], args: argparse.Namespace, passed_on: Sequence[str] = ()) -> _T:
    """The dataclass with the values of a command line. Raises what it does for values that cannot work together."""
    given = {**vars(args), PASSED_ON: tuple(passed_on)}
    hints = get_type_hints(options)
    values = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        if field.name in given:
            kind, value = hints[field.name], given[field.name]
            values[field.name] = kind(value) if isinstance(kind, enum.EnumMeta) else value
    return options(**values)


def _read(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A hint's type, which may be optional, and what it is annotated with, from the inside out."""
    if get_origin(hint) is Annotated:
        kind, said = _read(hint.__origin__)
        return kind, (*said, *hint.__metadata__)
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
        return _read(hint)
    return hint, ()


def _words(field: dataclasses.Field[Any], kind: Any, texts: list[str], parse: list[Any]) -> dict[str, Any]:
    text, words = texts[-1], dict[str, Any]()
    if kind is bool:
        return {"action": "store_true", "help": text}
    if isinstance(kind, enum.EnumMeta) or get_origin(kind) is Literal:
        words["choices"] = [str(one) for one in (kind if isinstance(kind, enum.EnumMeta) else get_args(kind))]
    else:
        plain = get_origin(kind) or kind
        words["metavar"] = texts[0] if len(texts) > 1 else _METAVARS.get(plain, "NAME")
        words["type"] = parse[-1] if parse else plain
    if field.default is dataclasses.MISSING:
        return {**words, "required": True, "help": text}
    if field.default is not None:
        shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        text = f"{text} (default: {shown})".strip()
    return {**words, "default": field.default, "help": text.replace("%", "%%")}
