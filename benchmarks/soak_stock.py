"""Stock vLLM as the judge of what a server generated, in a process of its own.

``python benchmarks/soak_stock.py MODEL CHAINS OUT``: reads chains, computes each of them once
as a prompt, and writes what stock vLLM says of every generated position. The first line is
about the judge itself: the largest difference between two ways of stock vLLM to compute the
same (as a prompt; decoded after a prefix hit, among others and alone).
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run as a script, from anywhere

from benchmarks.soak_chain import Chain, read_chains
from benchmarks.soak_verdicts import StockToken, Verdict, tolerance_of

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 2048
_POOL_BLOCKS = 1200
_MAX_SEQS = 16
_AT_ONCE = 64
_CALIBRATION_CHAINS = 12
_CALIBRATION_TOKENS = 24

Said = list[tuple[float, float]]


class StockEngine:
    """vLLM without a connector, in this process."""

    def __init__(self, model: Path) -> None:
        from vllm import LLM

        self._llm: Any = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=_POOL_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=_MAX_SEQS,
        )

    def judge(self, chains: Sequence[Chain]) -> list[Said]:
        """For each chain, at every generated position: logprob of its token, and of the best."""
        prompts = [chain.checked_tokens() for chain in chains]
        answers = self._run(prompts, max_tokens=1, prompt_logprobs=1)
        said = []
        for chain, answer in zip(chains, answers, strict=True):
            positions = [at for one in chain.replies for at in range(one.start, one.stop)]
            said.append([_at(answer, chain.tokens[at], at) for at in positions])
        return said

    def own_difference(self, chains: Sequence[Chain]) -> float:
        """How much it differs from itself on the beginnings of these chains."""
        ways = [self._decode(chains), self._decode(chains)]  # cold, then after a prefix hit
        ways.append([self._decode([chain])[0] for chain in chains])
        largest = 0.0
        for way in ways:
            found = self.judge(way)
            for chain, said in zip(way, found, strict=True):
                (reply,) = chain.replies
                pairs = zip(reply.logprobs, said, strict=True)
                largest = max(largest, *(abs(ours - there) for ours, (there, _) in pairs))
        return largest

    def _decode(self, chains: Sequence[Chain]) -> list[Chain]:
        prompts = [chain.tokens[: chain.replies[0].start] for chain in chains]
        answers = self._run(prompts, max_tokens=_CALIBRATION_TOKENS, logprobs=1, ignore_eos=True)
        decoded = []
        for prompt, answer in zip(prompts, answers, strict=True):
            completion = answer.outputs[0]
            steps = zip(completion.logprobs, completion.token_ids, strict=True)
            one = Chain(list(prompt))
            one.add_reply(completion.token_ids, [step[t].logprob for step, t in steps], "stock")
            decoded.append(one)
        return decoded

    def _run(self, prompts: Sequence[list[int]], **how: int | bool) -> Any:  # noqa: ANN401
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, detokenize=False, **how)  # type: ignore[arg-type]
        requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self._llm.generate(requests, params, use_tqdm=False)


def _at(answer: Any, token: int, position: int) -> tuple[float, float]:  # noqa: ANN401
    entries = answer.prompt_logprobs[position]
    return entries[token].logprob, max(one.logprob for one in entries.values())


def read_judged(
    chains_path: Path, said_path: Path
) -> tuple[float, Iterator[tuple[Chain, list[StockToken]]]]:
    """By how much stock vLLM differs from itself, and every chain with what it says there."""
    lines = said_path.open()
    own: float = json.loads(next(lines))["own_difference"]

    def judged() -> Iterator[tuple[Chain, list[StockToken]]]:
        with lines:
            for chain, line in zip(read_chains(chains_path), lines, strict=True):
                yield chain, [StockToken(*pair) for pair in json.loads(line)]

    return own, judged()


def read_verdict(chains_path: Path, said_path: Path) -> Verdict:
    """Judge every chain by what the process wrote about it."""
    own, judged = read_judged(chains_path, said_path)
    verdict = Verdict(tolerance_of([own]), own)
    for chain, said in judged:
        verdict.add(chain, said)
    return verdict


def stock_environment() -> dict[str, str]:
    """Of the judge's process; the number of threads is the server's."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "GOMP_SPINCOUNT": "30000",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    }


def _batches(chains: Iterator[Chain]) -> Iterator[list[Chain]]:
    while batch := list(islice(chains, _AT_ONCE)):
        yield batch


def main(model: Path, chains_path: Path, out_path: Path) -> int:
    """Judge all of a file."""
    engine = StockEngine(model)
    started, done = time.monotonic(), 0
    with out_path.open("w") as out:
        some = list(islice(read_chains(chains_path), _CALIBRATION_CHAINS))
        out.write(json.dumps({"own_difference": engine.own_difference(some)}) + "\n")
        for batch in _batches(read_chains(chains_path)):
            for said in engine.judge(batch):
                out.write(json.dumps(said) + "\n")
            done += sum(len(chain.checked_tokens()) for chain in batch)
            print(f"judged {done} tokens in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    os.environ.update(stock_environment())  # read when vLLM is imported
    code = main(*map(Path, sys.argv[1:4]))
    sys.stdout.flush()
    os._exit(code)  # nothing is left to be done, and taking vLLM apart needs two seconds
