"""What is remembered of sessions as tokens: whole blocks, one path, within a bound."""

from typing import Any, cast

import pytest
from vllm.lora.request import LoRARequest

from connectors.wrapping.chains import SessionChains
from tests.connectors.scheduler.kit import geometry_of
from tests.connectors.scheduler.vllm_parts import FULL, UNEVEN, Attention, make_request
from tests.spm.sam.kit import ref_of

A, B, C = ref_of("a"), ref_of("b"), ref_of("c")
PROMPT = list(range(3, 44))


def chains_of(model: tuple[Attention, ...] = FULL, max_tokens: int = 1000) -> SessionChains:
    return SessionChains(max_tokens, geometry_of(model))


def test_a_chain_is_the_blocks_that_were_computed() -> None:
    chains, request = chains_of(), make_request("r", PROMPT)
    chain = chains.put(A, request, 23)
    assert chain is not None
    assert chain.tokens.tolist() == PROMPT[:20]
    hashes = [bytes(key)[:-4] for key in chain.keys]
    assert hashes == [bytes(name) for name in request.block_hashes[:5]]
    assert chains.total_tokens == 20


def test_it_goes_on_where_the_session_goes_on() -> None:
    chains = chains_of()
    first = chains.put(A, make_request("1", PROMPT[:21]), 20)
    longer = make_request("2", PROMPT)
    looked_at: list[slice] = []

    class Tokens(list[int]):
        def __getitem__(self, at: Any) -> Any:  # noqa: ANN401
            looked_at.append(at)
            return super().__getitem__(at)

    longer.all_token_ids = cast("Any", Tokens(PROMPT))
    second = chains.put(A, longer, 40)
    assert second is first
    assert second is not None
    assert second.tokens.tolist() == PROMPT[:40]
    assert len(second.keys) == 10
    assert looked_at == [slice(20, 40)], "only new tokens are looked at"
    assert chains.total_tokens == 40


def test_a_part_of_it_changes_nothing() -> None:
    chains = chains_of()
    first = chains.put(A, make_request("1", PROMPT), 40)
    assert chains.put(A, make_request("2", PROMPT[:13]), 12) is first
    assert chains.put(A, make_request("3", PROMPT), 0) is first
    assert first is not None
    assert len(first) == 10


@pytest.mark.parametrize("model", [FULL, UNEVEN], ids=["one group", "two groups"])
def test_another_path_is_another_chain(model: tuple[Attention, ...]) -> None:
    chains = chains_of(model)
    first = chains.put(A, make_request("1", PROMPT), 40)
    other = [*PROMPT[:17], 99, *PROMPT[18:]]
    second = chains.put(A, make_request("2", other), 40)
    assert second is not None
    assert second is not first
    assert second.tokens.tolist() == other[:40]
    assert chains.total_tokens == 40
    assert first is not None
    assert first.tokens.tolist() == PROMPT[:40], "whoever still uses it sees no change"


def test_with_several_groups_blocks_are_as_long_as_the_longest() -> None:
    chains = chains_of(UNEVEN)
    chain = chains.put(A, make_request("1", PROMPT), 23)
    assert chain is not None
    assert chain.tokens.tolist() == PROMPT[:16]
    assert len(chain) == 2
    assert chain.keys == [], "vLLM publishes several blocks for each"


def test_salt_and_adapter_are_kept() -> None:
    chains, request = chains_of(), make_request("1", PROMPT)
    request.cache_salt = "tenant"
    request.lora_request = LoRARequest("adapter", 1, "/nowhere")
    chain = chains.put(A, request, 40)
    assert chain is not None
    assert chain.cache_salt == "tenant"
    assert chain.adapter is request.lora_request


def test_images_and_embeddings_have_no_chain() -> None:
    chains, request = chains_of(), make_request("1", PROMPT)
    chains.put(A, make_request("0", PROMPT), 40)
    request.mm_features = cast("Any", [object()])
    assert chains.put(A, request, 40) is None
    assert chains.get(A) is None, "what was there is not what the session is now"
    embedded = make_request("2", PROMPT)
    embedded.prompt_token_ids = None
    assert chains.put(A, embedded, 40) is None
    assert chains.total_tokens == 0


def test_cut_and_forgotten() -> None:
    chains = chains_of()
    before = chains.put(A, make_request("1", PROMPT), 40)
    chains.cut(A, 3)
    after = chains.get(A)
    assert after is not None
    assert (len(after), len(after.tokens), chains.total_tokens) == (3, 12, 12)
    assert before is not None
    assert len(before) == 10
    chains.cut(A, 5)
    assert chains.get(A) is after, "it is shorter already"
    chains.cut(A, 0)
    assert chains.get(A) is None
    assert chains.total_tokens == len(chains) == 0
    chains.forget(A)


def test_over_the_bound_the_one_used_longest_ago_goes() -> None:
    chains = chains_of(max_tokens=50)
    chains.put(A, make_request("1", PROMPT), 20)
    chains.put(B, make_request("2", PROMPT), 20)
    chains.put(A, make_request("3", PROMPT), 20)
    chains.put(C, make_request("4", PROMPT), 12)
    assert chains.get(B) is None
    assert chains.get(A) is not None
    assert chains.put(B, make_request("5", PROMPT * 2), 80) is None, "it alone is too long"
    assert chains.total_tokens == 0
    assert chains_of(max_tokens=0).put(A, make_request("6", PROMPT), 40) is None
