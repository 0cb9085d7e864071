"""What R4, the rotation in front of `down_proj`, and a turned cache cost: a prompt, and a token.

    export OMP_NUM_THREADS=1
    python -m benchmarks.speed.online_rotations  # three minutes; needs transformers

A fifth of SmolLM2-135M: six of its layers, a fifth of its vocabulary. Processor times, medians of
the ratios in interleaved rounds: with R4 over without it, and of a cache over one of the same bits
that is not turned.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import harness
from stiefel_opt import rotations

LAYERS, PROMPT, TOKENS, LONG = 6, 256, 8, 1024
SIZES = {
    "vocab_size": 9830,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
}


@torch.no_grad()
def read(model: Any, ids: Tensor, cache: Any) -> None:
    model(ids, past_key_values=cache, use_cache=True)


@torch.no_grad()
def tokens(model: Any, ids: Tensor, cache: Any) -> None:
    for place in range(TOKENS):
        model(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
    cache.crop(-TOKENS)


def unturned(config: Any) -> Any:
    """A cache on grids of the same kind, in the basis of the model."""
    module = importlib.import_module("stiefel_opt.rotations.turned_cache")

    def rounded(layer: Any, _: int, x: Tensor) -> Any:
        return module.rounded_rows(x.float(), layer.bits, x.dtype)

    def restore(layer: Any, _: int, codes: Any, out: Tensor) -> None:
        packed, middle, step = codes
        levels = out.new_empty(out.shape)
        for piece, half in zip(
            levels.chunk(2, -1), module.levels_of(packed, layer.bits), strict=True
        ):
            piece.copy_(half)
        torch.mul(levels, step, out=out).add_(middle)

    plain = type("Plain", (module.TurnedLayer,), {"_rounded": rounded, "_restore": restore})
    cache = rotations.TurnedCache(config, residual_length=0)
    for layer in cache.layers:
        layer.__class__ = plain
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    harness.one_thread()
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    rotations.prepare_(base)
    folded = {
        name: rotations.fold_(copy.deepcopy(base), rotations.hadamard(base, online=online))
        for name, online in (("without R4", ()), ("R4", ("R4",)))
    }
    ids = torch.randint(SIZES["vocab_size"], (1, LONG))
    work: dict[str, Any] = {}
    for name, model in folded.items():
        cache = transformers.DynamicCache()
        read(model, ids[:, :PROMPT], cache)
        prompt = functools.partial(read, model, ids[:, :PROMPT])
        work[f"{name}, prompt"] = lambda prompt=prompt: prompt(transformers.DynamicCache())
        work[f"{name}, token"] = functools.partial(tokens, model, ids, cache)
    caches = {
        "turned": rotations.TurnedCache(base.config, residual_length=0),
        "not turned": unturned(base.config),
        "unrounded": transformers.DynamicCache(),
    }
    for name, cache in caches.items():
        read(base, ids, cache)
        work[f"cache, {name}"] = functools.partial(tokens, base, ids, cache)
    contestants = [harness.Contestant(name, call) for name, call in work.items()]
    options = {"rounds": arguments.rounds, "device": torch.device("cpu"), "seconds": 0.2}
    timings = harness.interleave(contestants, **options, clock=time.process_time)
    header = ["R4", f"prompt of {PROMPT} tokens", "token behind it"]
    share = [
        f"{timings.ratio(f'R4, {what}', f'without R4, {what}'):.2f}" for what in ("prompt", "token")
    ]
    cost = harness.markdown_table(header, [["time, over that without it", *share]])
    header = [f"cache of {LONG} tokens", "4 bits, not turned", "4 bits, turned", "unrounded"]
    names = ("not turned", "turned", "unrounded")
    cells = [f"{timings.ratio(f'cache, {n}', 'cache, not turned'):.2f}" for n in names]
    content = {
        "machine": harness.machine(packages=["transformers"]),
        "layers": LAYERS,
        "milliseconds": {name: timings.summary(name) for name in work},
        "tables": {
            "online": cost,
            "cache": harness.markdown_table(header, [["time of a token", *cells]]),
        },
    }
    harness.write_json(harness.RESULTS / "online_rotations.json", content)
    print(cost, content["tables"]["cache"], sep="\n")


if __name__ == "__main__":
    main()
