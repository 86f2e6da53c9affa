"""The list of cases: changed histories, and whatever else decides about what may be reused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from backhaul_bench.answers import COMPLETIONS
from backhaul_loopback.tokenizer import Special
from backhaul_router.report import Reason, Route

from .building import Build, again, extended, first, following, system, user
from .histories import edits, messages_of_other_kinds, prefaces
from .model import (
    STORY,
    WARM,
    Ask,
    AtOnce,
    Body,
    Case,
    Expect,
    Flush,
    Ids,
    Load,
    Message,
    Past,
    Step,
    World,
    cold,
    common_blocks,
    local,
)

# --- whose handle it is ---------------------------------------------------------------------------------------------------


def owners() -> Iterator[Case]:
    salted = Ask(body=extended(cache_salt="another"), expect=cold(Reason.FIRST_TURN), leaves=False)
    same = Ask(body=lambda past: {**following(past), "cache_salt": past.first.body["cache_salt"]})
    yield Case(
        name="another cache salt",
        first=lambda world: first(world, cache_salt=f"salt {world.mark}"),
        then=(salted, same),
    )
    unknown = Ask(body=extended(model="no such model"), status=404, leaves=False)
    yield Case(name="another model", first=first, then=(unknown, Ask(body=extended())))
    other = Ask(body=extended(), conversation="two", expect=cold(Reason.FIRST_TURN))
    yield Case(name="the handle's history in another conversation", first=first, then=(other, Ask(body=extended())))
    stranger = Ask(
        body=lambda past: first(past, messages=[system(f"Another agent, {past.mark}."), user(STORY * 3)]),
        expect=cold(Reason.DIVERGED),
        leaves=False,
    )
    yield Case(name="a sub-agent under the same id", first=first, then=(stranger, Ask(body=extended())))
    yield Case(
        name="a flush before a weight update",
        first=first,
        then=(Flush(), Ask(body=extended(), expect=cold(Reason.FLUSHED)), Ask(body=extended())),
    )


# --- several turns of one conversation ------------------------------------------------------------------------------------


def children(count: int, question: str = "{}: ") -> AtOnce:
    """A handle of stock engines is read once; the connector's, by all who ask."""

    def ask(index: int) -> Ask:
        def body(past: Past) -> Body:
            return {**following(past), "messages": past.history(question.format(index))}

        return Ask(body=body, expect=cold(Reason.IN_USE) if index else WARM, with_connector=WARM)

    return AtOnce(tuple(map(ask, range(count))))


def longer(past: Past) -> Body:
    return following(past, max_tokens=past.answer)


def turns() -> Iterator[Case]:
    yield Case(name="two turns at once", first=first, then=(children(2),))
    yield Case(name="the same turn twice at once", first=first, then=(children(2, "Once more: "),))
    yield Case(name="a fork into three children", first=first, then=(children(3, "Child {}: "),))
    yield Case(name="the same turn retried", first=first, then=(Ask(body=extended()), Ask(body=again)))
    yield Case(name="the first turn retried", first=first, then=(Ask(body=again), Ask(body=extended())))
    yield Case(name="four turns", first=first, then=(Ask(body=longer),) * 3)


# --- lengths ---------------------------------------------------------------------------------------------------------------


def completion(prompt: Callable[[World], Ids], max_tokens: int = 40) -> Callable[[World], Body]:
    def build(world: World) -> Body:
        fields = {"max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
        return {"prompt": list(prompt(world)), **fields}

    return build


def cut(short: Callable[[World], int], then: int) -> Build:
    """The sequence that D ran, its last `short` tokens left out, and `then` others after it."""

    def build(past: Past) -> Body:
        whole = [*past.last.prompt, *past.last.token_ids]
        prompt = [*whole[: len(whole) - short(past)], *past.ids(then, seed=1)]
        return {"prompt": prompt, "max_tokens": 12, "return_token_ids": True}

    return build


def after(
    name: str,
    start: Callable[[World], Ids],
    then: Build,
    expect: Expect = WARM,
    *,
    with_connector: Expect | None = None,
    max_tokens: int = 40,
) -> Case:
    step = Ask(body=then, expect=expect, with_connector=with_connector, path=COMPLETIONS)
    return Case(name=name, first=completion(start, max_tokens), then=(step,), path=COMPLETIONS, sampled=True)


def lengths() -> Iterator[Case]:
    def six_blocks(world: World) -> Ids:
        return world.ids(6 * world.block)

    for name, short in (
        ("a block but one token", lambda world: world.block - 1),
        ("a block", lambda world: world.block),
        ("a block and one token", lambda world: world.block + 1),
        ("nothing", lambda world: 0),
        ("one token", lambda world: 1),
        ("two tokens", lambda world: 2),
    ):
        for more in (0, 1, 100):
            what = {0: "retried", 1: "extended by one token", 100: "extended by many"}[more]
            yield after(f"a sequence short of {name}, {what}", six_blocks, cut(short, more))
    for around in (-1, 0, 1):
        yield threshold(around)
        yield threshold(around, blocks=1)
        yield boundary(around)
    yield after(
        "a prompt shorter than a block",
        lambda world: world.ids(world.block // 2),
        cut(lambda world: 0, 1),
        cold(Reason.NO_PROOF),
        with_connector=cold(Reason.NO_HANDLE),
        max_tokens=2,
    )
    yield after(
        "a prompt shorter than a block after a long one", six_blocks, shorter_than_a_block, cold(Reason.DIVERGED)
    )


def shorter_than_a_block(past: Past) -> Body:
    return {"prompt": past.last.prompt[: past.block // 2], "max_tokens": 12, "return_token_ids": True}


def boundary(around: int) -> Case:
    """What D ran ends around a block's end: answers of so many tokens."""

    def start(world: World) -> Body:
        return completion(lambda world: world.ids(5 * world.block), max_tokens=world.block + 1 + around)(world)

    step = Ask(body=cut(lambda world: 0, 90), path=COMPLETIONS)
    name = f"an answer that ends {NEARBY[around]} a block's end"
    return Case(name=name, first=start, then=(step,), path=COMPLETIONS, sampled=True)


def threshold(around: int, blocks: int = 0) -> Case:
    """D ran about as many tokens as are worth reading, or one block more, of which whole blocks count."""

    def length(world: World) -> int:
        return world.threshold + around + blocks * world.block

    enough = around >= 0 or blocks
    name = f"as much in common as {'a block above' if blocks else NEARBY[around]} the threshold"
    return after(
        f"{name} ({NEARBY[around]})",
        lambda world: world.ids(length(world)),
        lambda past: {"prompt": [*past.last.prompt, *past.ids(50, seed=1)], "max_tokens": 12, "return_token_ids": True},
        WARM if enough else cold(Reason.BELOW_THRESHOLD),
        max_tokens=1,
    )


NEARBY = {-1: "one before", 0: "at", 1: "one after"}


# --- how a turn ended ------------------------------------------------------------------------------------------------------


def endings() -> Iterator[Case]:
    def ends(name: str, expect: Expect = WARM, **fields: Any) -> Case:
        build: Callable[[World], Body] = lambda world: {**first(world, ignore_eos=False), **fields}  # noqa: E731
        return Case(name=f"an answer that ended {name}", first=build, then=(Ask(body=extended(), expect=expect),))

    # Models end by themselves, or are made to by the bias.
    yield ends("by itself", logit_bias={"2": 100}, min_tokens=20)
    yield ends("at its length", max_tokens=33, ignore_eos=True)
    yield ends("after one token", max_tokens=1)
    yield ends("at a stop token", stop_token_ids=[46, *range(300, 4000, 40)])
    yield ends("at a stop string", cold(Reason.NO_HANDLE), stop=["a", "e", "i", "o"])


# --- requests that go to D alone -------------------------------------------------------------------------------------------


def alone() -> Iterator[Case]:
    for name, fields, reason in (
        ("several choices", {"n": 2, "temperature": 0.8, "seed": 5}, Reason.MULTIPLE_CHOICES),
        ("an echo", {"echo": True, "add_generation_prompt": False}, Reason.NO_PROOF),
        ("log probabilities of the prompt", {"prompt_logprobs": 1, "stream": False}, Reason.NO_PROOF),
    ):
        odd = Ask(body=extended(**fields), expect=local(reason), leaves=False)
        yield Case(name=name, first=first, then=(odd, Ask(body=extended())))


# --- what token ids do not show --------------------------------------------------------------------------------------------


def up_to_the_image(ran: Ids, prompt: Ids, block: int) -> int:
    """The image's placeholder is the same token, whatever it shows."""
    return common_blocks(ran, prompt[: list(prompt).index(Special.IMAGE) + 1], block)


def picture(name: str) -> Message:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": name}}]}


def unseen() -> Iterator[Case]:
    def with_picture(world: World) -> Body:
        return first(world, messages=[system(f"{world.mark} {STORY}"), picture("a.png"), user(STORY)])

    def swapped(name: str) -> Build:
        return lambda past: following(past, lambda history: history.__setitem__(1, picture(name)))

    for name, file, rule in (("swapped", "b.png", up_to_the_image), ("kept", "a.png", common_blocks)):
        proven = Expect(Route.WARM, None, rule)
        step = Ask(body=swapped(file), expect=cold(Reason.NO_PROOF), with_connector=proven, own=rule)
        yield Case(name=f"an image {name}", first=with_picture, then=(step,), needs="images")


TUNED = "tuned"


def adapters() -> Iterator[Case]:
    """Token ids say nothing of an adapter; vLLM's block hashes cover its name and its path."""
    load, other = Load(TUNED, "one"), Load("another", "two")

    def tuned(world: World) -> Body:
        return first(world, model=TUNED)

    def case(name: str, *then: Step, start: Callable[[World], Body] = tuned) -> Case:
        return Case(name=name, first=start, then=then, before=(load, other), needs="adapters")

    same = extended(model=TUNED)
    yield case("an adapter kept", Ask(body=same, expect=cold(Reason.NO_PROOF), with_connector=WARM))
    moved = Ask(body=same, expect=cold(Reason.NO_PROOF), with_connector=cold(Reason.DIVERGED))
    yield case("an adapter's name pointed at another", Load(TUNED, "two"), moved)
    yield case("another adapter", Ask(body=extended(model=other.name), expect=cold(Reason.FIRST_TURN)))
    yield case("an adapter after the base model", Ask(body=same, expect=cold(Reason.FIRST_TURN)), start=first)


def all_cases() -> Iterable[Case]:
    for part in (edits, messages_of_other_kinds, prefaces, owners, turns, lengths, endings, alone, unseen, adapters):
        yield from part()


CASES: dict[str, Case] = {case.name: case for case in all_cases()}
