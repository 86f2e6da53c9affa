"""A fast path: messages, tools and prompts that are plain JSON pass by openai's transform, which costs it 0.15 ms a message.

openai walks every argument along its declared type before it sends it: keys are renamed, dates are formatted, pydantic
models are dumped. Values made of dicts, lists, strings, numbers, booleans and `None` come out as they went in, as long as
the type renames no key. So the methods here hand such a list to openai's own method in an `Untyped`, which the walk does
not enter, and `resolved` puts a copy of the list back into the body before the request is made of it. An item that is
anything else goes through openai's walk, alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast, get_args

import openai
from openai._utils import PropertyInfo, maybe_transform
from typing_extensions import get_type_hints, is_typeddict

Resource = TypeVar("Resource")
Fields = Mapping[str, Sequence[str]]
"""Names of a resource's methods, and which of their arguments are lists that may be long."""


class Untyped:
    """A list on its way through one of openai's methods. It can be read like the list.

    It has no `__iter__`: openai walks what is an `Iterable`.
    """

    __slots__ = ("name", "params", "value")

    def __init__(self, value: list[Any], name: str, params: type) -> None:
        self.value = value
        self.name = name
        self.params = params

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: int) -> Any:
        return self.value[index]

    def __repr__(self) -> str:
        return repr(self.value)

    def resolve(self) -> list[Any]:
        """The list as openai's transform would have made it, at this moment: a copy, as there."""
        try:
            return [item if type(item) in _ATOMS else _copy(item) for item in self.value]
        except (_NotPlain, RecursionError):
            return [made for item in self.value for made in self._resolve(item)]

    def _resolve(self, item: Any) -> Any:
        try:
            return [_copy(maybe_transform(item, object) if isinstance(item, openai.BaseModel) else item)]
        except (_NotPlain, RecursionError):
            return maybe_transform({self.name: [item]}, self.params)[self.name]  # type: ignore[index]


def fast(resource: type[Resource], fields: Fields, params: type) -> type[Resource]:
    """A subclass of one of openai's resources. `params` is the type along which its methods walk their arguments."""
    made: type[Resource] = _made(
        cast("Any", resource), tuple((name, tuple(names)) for name, names in fields.items()), params
    )
    return made


def resolved(body: Any) -> Any:
    """The body of a request, with lists where it has `Untyped`."""
    if type(body) is not dict or not any(type(value) is Untyped for value in body.values()):
        return body
    return {key: value.resolve() if type(value) is Untyped else value for key, value in body.items()}


def chat(of_client: Any) -> Any:
    """openai's `client.chat`, with fast completions."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

    fields = {"create": ("messages", "tools"), "parse": ("messages",)}
    made = fast(type(of_client.completions), fields, CompletionCreateParamsNonStreaming)
    of_client.completions = made(of_client._client)
    return of_client


def completions(of_client: Any) -> Any:
    """openai's `client.completions`, fast: a prompt may be thousands of token ids."""
    from openai.types.completion_create_params import CompletionCreateParamsNonStreaming

    return fast(type(of_client), {"create": ("prompt",)}, CompletionCreateParamsNonStreaming)(of_client._client)


def responses(of_client: Any) -> Any:
    """openai's `client.responses`, fast. Not `parse`, which reads its arguments itself."""
    from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

    return fast(type(of_client), {"create": ("input", "tools")}, ResponseCreateParamsNonStreaming)(of_client._client)


@functools.cache
def _made(resource: Any, fields: tuple[tuple[str, tuple[str, ...]], ...], params: type) -> Any:
    methods = {name: _method(resource, name, names, params) for name, names in fields}
    return type(
        resource.__name__, (resource,), {**methods, "__module__": resource.__module__, "__doc__": resource.__doc__}
    )


def _method(resource: type[Any], name: str, arguments: Sequence[str], params: type) -> Callable[..., Any]:
    @functools.wraps(getattr(resource, name))
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        openais = getattr(resource, name)
        if _is_openais(openais):
            for argument in arguments:
                value = kwargs.get(argument)
                if type(value) is list and not _renames(params, argument):
                    kwargs[argument] = Untyped(value, argument, params)
        return openais(self, *args, **kwargs)

    return method


def _is_openais(method: Any) -> bool:
    """Whether no tracing library has put a method of its own in its place, which wants to see the real arguments."""
    return isinstance(method, FunctionType) and method.__globals__["__name__"].startswith("openai.")


@functools.cache
def _renames(params: type, argument: str) -> bool:
    """Whether openai's transform of the argument renames keys, or formats values."""
    return _says_how(get_type_hints(params, include_extras=True)[argument], set())


def _says_how(annotation: Any, seen: set[Any]) -> bool:
    extras = getattr(annotation, "__metadata__", ())
    if any(isinstance(extra, PropertyInfo) and (extra.alias or extra.format) for extra in extras):
        return True
    if not is_typeddict(annotation):
        return any(_says_how(part, seen) for part in get_args(annotation))
    if annotation in seen:
        return False
    seen.add(annotation)
    return any(_says_how(hint, seen) for hint in get_type_hints(annotation, include_extras=True).values())


class _NotPlain(Exception):
    pass


_ATOMS = frozenset({str, int, float, bool, type(None)})


def _copy(value: Any) -> Any:
    """A copy of plain JSON. Raises `_NotPlain` where there is something else, subclasses of dict and list included."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {key: item if type(item) in _ATOMS else _copy(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [item if type(item) in _ATOMS else _copy(item) for item in value]
    if isinstance(value, str | int | float):  # an enumeration's member, most often
        return value
    raise _NotPlain
