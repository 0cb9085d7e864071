"""Certified accuracy beside orthogonium's AOC, deel-torchlip and an unconstrained network.

    python -m benchmarks.accuracy.certified --data-dir DIR --stage search time steps layers
    python -m benchmarks.accuracy.certified --stage tables      # from what has been run

Every run is kept in ``--folder`` as soon as it ends, and skipped the next time. It needs
``pip install --no-deps orthogonium deel-torchlip einops``.

**Networks.** One layout: patches of 4 x 4 pixels to 96 channels, two blocks on 8 x 8, patches of
2 x 2 to 192 channels, two blocks on 4 x 4, a last layer of ten rows. A block is

- ``shift``: a shift by a pixel, then a tagged 1 x 1 convolution;
- ``turned``: a learned position, a tagged 1 x 1 convolution R, the shift, another one M, after the
  block of LipNeXt, act(M R' S R (x + p) + b), whose M R' is one orthonormal matrix;
- ``AOC``, ``torchlip``: their 3 x 3 convolutions; ``free``: a plain one, with batch normalisation.

Activations: the absolute value of half of the channels for ours, MaxMin and GroupSort2 for theirs,
ReLU for the unconstrained one. Ours have unit rows in the last layer, theirs their own.

**Training.** The same loss (`so.nn.MarginCrossEntropy` with its defaults; cross-entropy for the
unconstrained one), shifted and mirrored images, cosine to 0 after 30 steps of warm-up, StiefelAdam
or Adam. Time is that of the processor in one thread, of the steps alone: forward pass, backward
pass and optimizer, without images and evaluation. ``time`` ends after ``--seconds``, ``steps``
after ``--steps``, ``both`` when both are over, which counts for either. ``search`` tries `RATES`
with batches of 128, `BEYOND` if the largest is best, then half and twice that batch, on seed 100,
for ``--search-seconds``; with ``--search-steps`` learning rates only. The certified accuracy at
36/255 decides, for the unconstrained network the accuracy.

**Certificates.** All by `so.lipschitz_bound(model, input_size)` of what is exported as plain
layers, or by the packages' own bound of 1 if that is lower, and the distances of the last rows.
The attack: PGD of 50 steps in the 2-norm on the margin, from a random point of the ball, on the
runs of seed 0 on CIFAR-10. Answers that change in float32 are attacked again in float64, as a
certificate is of exact arithmetic. Curves are of 500 test images.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import stiefel_opt as so
from benchmarks.common.harness import (
    RESULTS,
    Contestant,
    atomic,
    interleave,
    machine,
    markdown_table,
    one_thread,
    write_json,
)
from benchmarks.common.images import crop_flip, load_images

NETWORKS = ("shift", "torchlip", "AOC", "turned", "free")
RATES, BEYOND = (0.003, 0.01, 0.03), 0.1
RADII = tuple(number / 255 for number in (0, 36, 72, 108))
CHOOSING = 100  # the seed of the search
BATCHES = (64, 256)
# Learning rates where nothing was searched: the better of two, for one minute, by a first version.
USUAL = {"shift": 0.01, "turned": 0.01, "torchlip": 0.02, "AOC": 0.005, "free": 0.003}
WIDTH, PATCH = 96, 4
POINTS = 10  # of the curve
LIMITS = {"time": ("seconds",), "steps": ("steps",), "both": ("seconds", "steps")}
OURS = ("shift", "turned")
NAMES = {
    "shift": "ShiftConv2d",
    "turned": "rotation, shift, rotation",
    "torchlip": "deel-torchlip",
    "AOC": "orthogonium, AOC",
    "free": "unconstrained",
}
PACKAGES = ("orthogonium", "deel-torchlip")


# ---- networks ------------------------------------------------------------------------------------


class Position(nn.Module):
    """x + p, a learned number for each channel and pixel."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(channels, side, side))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position


class Centre(nn.Module):
    """x - m, the mean of the training images for each channel."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


def tagged(entering: int, leaving: int, bias: bool = True) -> nn.Module:
    layer = nn.Conv2d(entering, leaving, 1, bias=bias)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return so.constrain(layer)


def ours(kind: str, width: int, side: int) -> list[nn.Module]:
    if kind == "shift":
        return [so.nn.ShiftConv2d(width, width), so.nn.BetaAbs()]
    before = [Position(width, side), tagged(width, width, bias=False), so.nn.SpatialShift()]
    return [*before, tagged(width, width), so.nn.BetaAbs()]


def layer_of(kind: str) -> tuple[Callable[[int, int, int], nn.Module], Callable[[], nn.Module]]:
    """How a network without tags makes a layer of in, out and side, and an activation."""
    if kind == "AOC":
        from orthogonium.layers import MaxMin
        from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d

        def convolution(entering: int, leaving: int, side: int) -> nn.Module:
            layout = {"padding": side // 2, "padding_mode": "circular"}
            return AdaptiveOrthoConv2d(entering, leaving, side, **layout)

        return convolution, MaxMin
    if kind == "torchlip":
        from deel import torchlip

        def spectral(entering: int, leaving: int, side: int) -> nn.Module:
            return torchlip.SpectralConv2d(entering, leaving, side, padding=side // 2)

        return spectral, torchlip.GroupSort2

    def plain(entering: int, leaving: int, side: int) -> nn.Module:
        layer = nn.Conv2d(entering, leaving, side, padding=side // 2, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(leaving))

    return plain, nn.ReLU


def network(
    kind: str, channels: int, mean: Tensor, width: int = WIDTH, depth: int = 2
) -> nn.Module:
    """The layout of the docstring for images of 32 x 32."""
    layers: list[nn.Module] = [Centre(mean), nn.PixelUnshuffle(PATCH)]
    side, entering = 32 // PATCH, channels * PATCH**2
    for stage_width in (width, 2 * width):
        if kind in OURS:
            layers += [tagged(entering, stage_width), so.nn.BetaAbs()]
        else:
            convolution, activation = layer_of(kind)
            layers += [convolution(entering, stage_width, 1), activation()]
        for _ in range(depth):
            if kind in OURS:
                layers += ours(kind, stage_width, side)
            else:
                layers += [convolution(stage_width, stage_width, 3), activation()]
        if stage_width == width:
            layers.append(nn.PixelUnshuffle(2))
            side, entering = side // 2, 4 * width
    return nn.Sequential(*layers, nn.Flatten(), last_layer(kind, 2 * width * side**2))


def last_layer(kind: str, features: int) -> nn.Module:
    if kind in OURS:
        return so.nn.NormalizedLinear(features, 10)
    if kind == "AOC":
        from orthogonium.layers import OrthoLinear

        return OrthoLinear(features, 10)
    if kind == "torchlip":
        from deel import torchlip

        return torchlip.SpectralLinear(features, 10)
    return nn.Linear(features, 10)


def exported(kind: str, model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The same function in plain layers, in evaluation mode; the model itself is left alone."""
    mode = model.training
    model.eval()
    if kind == "torchlip":
        with torch.no_grad():
            model(torch.zeros(2, *shape))
        layers = [m.vanilla_export() if hasattr(m, "vanilla_export") else m for m in model]
    else:
        layers = [plain_copy(layer) for layer in model]
    plain = copy.deepcopy(nn.Sequential(*layers)).eval()
    model.train(mode)
    return plain


@torch.no_grad()
def plain_copy(layer: nn.Module) -> nn.Module:
    """A plain layer with the present weight of a parametrized one."""
    if not parametrize.is_parametrized(layer):
        return layer
    bias = layer.bias is not None
    if isinstance(layer, nn.Conv2d):
        sizes = layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride
        mode = layer.padding_mode
        plain: Any = nn.Conv2d(*sizes, layer.padding, bias=bias, padding_mode=mode)
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=bias)
    plain.weight.copy_(layer.weight)
    if bias:
        plain.bias.copy_(layer.bias)
    return plain


# ---- training ------------------------------------------------------------------------------------


class Data:
    """Images from 0 to 1, and the batches of one seed."""

    def __init__(self, name: str, folder: Path) -> None:
        images = load_images(name, folder)

        def scaled(part: Tensor) -> Tensor:
            part = part.float() / 255
            return part if name == "cifar10" else nn.functional.pad(part, (2, 2, 2, 2))

        self.name = name
        self.images, self.labels = images.train_images, images.train_labels
        self.scaled = scaled
        self.test, self.test_labels = scaled(images.test_images[::2]), images.test_labels[::2]
        mean = scaled(images.train_images[:: max(1, len(images.train_images) // 8000)]).mean(
            (0, 2, 3)
        )
        self.mean = mean[:, None, None] if name == "cifar10" else torch.zeros(1, 1, 1)
        self.shape = tuple(self.test.shape[1:])

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """The images of one step, whatever was drawn before."""
        epoch, place = divmod(step, len(self.labels) // size)
        order = torch.Generator().manual_seed(1000 * seed + epoch)
        chosen = torch.randperm(len(self.labels), generator=order)[
            size * place : size * (place + 1)
        ]
        images = self.scaled(self.images[chosen])
        if self.name == "cifar10":
            images = crop_flip(images, torch.Generator().manual_seed(10**9 + 10**6 * seed + step))
        return images, self.labels[chosen]


def train(
    kind: str,
    data: Data,
    setting: dict[str, Any],
    path: Path,
    after: Callable[[nn.Module], dict[str, Any]] | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Train for ``seconds`` of one thread and ``steps``; goes on from ``path`` if that is there.

    Returns the model, and how long it took, with what ``after`` returned at points of the curve.
    """
    torch.manual_seed(setting["seed"])
    model = network(kind, data.shape[0], data.mean, setting.get("width", WIDTH)).train()
    rate, limits = setting["rate"], [key for key in ("seconds", "steps") if key in setting]
    rule: Any = so.StiefelAdam if kind in OURS else torch.optim.Adam
    optimizer = rule(model.parameters(), lr=rate)
    loss_of = nn.CrossEntropyLoss() if kind == "free" else so.nn.MarginCrossEntropy()
    done: dict[str, Any] = {"seconds": 0.0, "steps": 0, "curve": []}
    if path.exists():
        kept = torch.load(path, weights_only=False)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        done = kept["done"]
    saved = done["seconds"]
    while (progress := min(done[key] / setting[key] for key in limits)) < 1:
        images, labels = data.batch(setting["seed"], done["steps"], setting["batch"])
        begun = time.process_time()
        factor = min(1.0, (done["steps"] + 1) / 30) * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * rate * factor
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()
        done["steps"] += 1
        done["seconds"] += time.process_time() - begun
        progress = min(done[key] / setting[key] for key in limits)
        if after is not None and progress >= (len(done["curve"]) + 1) / POINTS:
            done["curve"].append({key: done[key] for key in ("seconds", "steps")} | after(model))
            model.train()
        if done["seconds"] > saved + 10:
            saved = done["seconds"]
            with atomic(path) as temporary:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"done": done}, temporary)
    return model, done


# ---- certificates and attacks --------------------------------------------------------------------


@torch.no_grad()
def certified(kind: str, model: nn.Module, data: Data, count: int | None = None) -> dict[str, Any]:
    """Accuracy at each radius; the bound of the body and of the whole."""
    plain = exported(kind, model, data.shape)
    body, head = plain[:-1], plain[-1]
    bound = proven = so.lipschitz_bound(body, data.shape)
    if kind in ("AOC", "torchlip"):
        bound = min(bound, 1.0)  # what the package promises
    images, labels = data.test, data.test_labels
    if count:  # the file is sorted by class
        chosen = torch.linspace(0, len(labels) - 1, count).long()
        images, labels = data.test[chosen], labels[chosen]
    logits = torch.cat([plain(part) for part in images.split(500)])
    radii = so.certified_radius(logits, bound, head)
    right = logits.argmax(1) == labels
    shares = [100 * float((right & (radii > radius)).float().mean()) for radius in RADII]
    return {"accuracy": shares, "bound_of_body": bound, "proven_bound": proven}


def attack(model: nn.Module, data: Data, bound: float) -> dict[str, Any]:
    """How many answers change inside the radius, at twice the radius, and within 36/255."""
    count, few, steps = 1000, 200, 50
    chosen = torch.linspace(0, len(data.test_labels) - 1, count).long()
    chosen = chosen[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    images, labels = data.test[chosen], data.test_labels[chosen]
    for weight in model.parameters():
        weight.requires_grad_(False)
    with torch.no_grad():
        logits = model(images)
    radii, answers = so.certified_radius(logits, bound, model[-1]), logits.argmax(1)
    inside = _fooled(model, images, answers, 0.999 * radii, steps)
    rounded, exact = int(inside.sum()), 0
    if rounded:  # a certificate is of exact arithmetic: again in float64
        finer, some = copy.deepcopy(model).double(), images[inside].double()
        with torch.no_grad():
            logits = finer(some)
        least = 0.999 * so.certified_radius(logits, bound, finer[-1])
        exact = int(_fooled(finer, some, logits.argmax(1), least, steps).sum())
    images, labels, answers, radii = images[:few], labels[:few], answers[:few], radii[:few]
    fooled = _fooled(model, images, answers, torch.full_like(radii, RADII[1]), steps)
    return {
        "images": count,
        "inside": exact,
        "inside_by_rounding": rounded - exact,
        "images_outside": few,
        "at_twice": int(_fooled(model, images, answers, 2.0 * radii, steps).sum()),
        "accuracy_attacked_36": 100 * float(((answers == labels) & ~fooled).float().mean()),
    }


def _fooled(model: nn.Module, images: Tensor, answers: Tensor, radii: Tensor, steps: int) -> Tensor:
    parts = zip(images.split(250), answers.split(250), radii.split(250), strict=True)
    return torch.cat([_fooled_batch(model, *part, steps) for part in parts])


def _fooled_batch(
    model: nn.Module, x: Tensor, answer: Tensor, radius: Tensor, steps: int
) -> Tensor:
    radius = radius.view(-1, 1, 1, 1)

    def length(v: Tensor) -> Tensor:
        return v.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)

    generator = torch.Generator().manual_seed(0)
    move = torch.randn(x.shape, generator=generator).to(x)
    move = 0.5 * radius * move / length(move)
    found = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(steps):
        move.requires_grad_()
        logits = model(x + move)
        others = logits.scatter(1, answer[:, None], -math.inf).amax(1)
        margin = logits.gather(1, answer[:, None]).squeeze(1) - others
        found |= margin.detach() <= 0
        (slope,) = torch.autograd.grad(margin.sum(), move)
        move = (move - 0.25 * radius * slope / length(slope)).detach()
        move = move * (radius / length(move)).clamp_max(1.0)
    with torch.no_grad():
        return found | (model(x + move).argmax(1) != answer)


# ---- stages --------------------------------------------------------------------------------------


class Store:
    """Finished runs by name, a file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def put(self, name: str, record: dict[str, Any]) -> dict[str, Any]:
        write_json(self.folder / f"{name}.json", record)
        return record

    def restore(self, output: Path) -> None:
        """Take in what an earlier session has published."""
        if output.exists():
            content = json.loads(output.read_text())
            finished = {name_of(record): record for record in content["runs"] + content["searched"]}
            for name, record in (finished | {"layers": content["layers"]}).items():
                if self.get(name) is None:
                    self.put(name, record)


def name_of(record: dict[str, Any]) -> str:
    """The name of a run: what was trained, how, for how long, and the seed."""
    counted = tuple(key for key in ("seconds", "steps") if key in record)
    limit = "-".join(f"{record[key]:g}" for key in counted)
    label = (
        "search"
        if record["seed"] == CHOOSING
        else next(key for key, value in LIMITS.items() if value == counted)
    )
    width = f"-{record['width']}" if "width" in record else ""
    options = f"{record['rate']:g}-{record['batch']}-{limit}-{record['seed']}{width}"
    return f"{record['data']}-{label}-{record['network']}-{options}"


def run(kind: str, data: Data, setting: dict[str, Any], store: Store) -> dict[str, Any]:
    """One training, or what the store has of it."""
    name = name_of({"network": kind, "data": data.name, **setting})
    if known := store.get(name):
        return known
    is_search = setting["seed"] == CHOOSING

    def after(model: nn.Module) -> dict[str, Any]:
        return {"accuracy": certified(kind, model, data, 500)["accuracy"]}

    path = store.folder / f"{name}.pt"
    model, done = train(kind, data, setting, path, None if is_search else after)
    found = certified(kind, model, data, 500 if is_search else None)
    record = {"network": kind, "data": data.name, **setting, "trained_seconds": done["seconds"]}
    record |= {"trained_steps": done["steps"], **found, "curve": done["curve"]}
    if data.name == "cifar10" and setting["seed"] == 0:
        plain = exported(kind, model, data.shape)
        record["attack"] = attack(plain, data, found["bound_of_body"])
    record["machine"] = machine(packages=PACKAGES)
    accuracy = " ".join(f"{share:.1f}" for share in found["accuracy"])
    print(f"{name}: {done['steps']} steps, {done['seconds']:.0f} s, {accuracy}", flush=True)
    path.unlink(missing_ok=True)
    return store.put(name, record)


def search(kind: str, data: Data, store: Store, limit: dict[str, Any]) -> dict[str, Any]:
    """The learning rate of a network and, at equal time, the batch."""
    place = 0 if kind == "free" else 1

    def score(rate: float, batch: int) -> float:
        setting = {"rate": rate, "batch": batch, **limit, "seed": CHOOSING}
        shares: list[float] = run(kind, data, setting, store)["accuracy"]
        return shares[place]

    rate = max(RATES, key=lambda value: score(value, 128))
    if rate == RATES[-1]:
        rate = max((rate, BEYOND), key=lambda value: score(value, 128))
    sizes = (128, *BATCHES) if "seconds" in limit else (128,)
    batch = max(sizes, key=lambda size: score(rate, size))
    return store.put(chosen_name(kind, data, limit), {"rate": rate, "batch": batch})


def chosen_name(kind: str, data: Data, limit: dict[str, Any]) -> str:
    """Where the store has what was found for a network of this width."""
    width = f"-{limit['width']}" if "width" in limit else ""
    return f"{data.name}-chosen-{kind}{width}"


def layers(store: Store, rounds: int) -> dict[str, Any]:
    """Forward and backward of one layer on 128 images and its optimizer's step, milliseconds."""
    found: dict[str, Any] = {"machine": machine(packages=PACKAGES)}
    for width, side in ((96, 8), (192, 4)):
        parts: dict[str, nn.Module] = {
            "plain 3 x 3": nn.Conv2d(width, width, 3, padding=1),
            "ShiftConv2d": so.nn.ShiftConv2d(width, width),
            "turned block": nn.Sequential(*ours("turned", width, side)[:-1]),
            "IsometricConv2d": so.nn.IsometricConv2d(width, width),
        }
        try:
            parts["AOC"] = layer_of("AOC")[0](width, width, 3)
            parts["torchlip"] = layer_of("torchlip")[0](width, width, 3)
        except ImportError as error:
            print(f"left out: {error}")
        x = torch.randn(128, width, side, side, requires_grad=True)
        contestants = []
        for name, layer in parts.items():
            is_ours = name in ("ShiftConv2d", "turned block", "IsometricConv2d")
            rule: Any = so.StiefelAdam if is_ours else torch.optim.Adam
            optimizer = rule(layer.parameters(), lr=1e-3)

            def call(layer: nn.Module = layer, optimizer: Any = optimizer, x: Tensor = x) -> None:
                optimizer.zero_grad()
                x.grad = None
                layer(x).square().mean().backward()
                optimizer.step()

            contestants.append(Contestant(name, call))
        device = torch.device("cpu")
        clock = time.process_time
        timings = interleave(contestants, rounds=rounds, device=device, seconds=0.2, clock=clock)
        found[f"{width} channels, {side} x {side}"] = {
            name: {
                "ms": 1e3 * timings.median(name),
                "least_ms": 1e3 * min(timings.seconds[name]),
                "of_plain": timings.ratio(name, "plain 3 x 3"),
                "quartiles": timings.ratio_quartiles(name, "plain 3 x 3"),
                "least_of_plain": min(timings.seconds[name]) / min(timings.seconds["plain 3 x 3"]),
            }
            for name in parts
        }
        print(json.dumps(found[f"{width} channels, {side} x {side}"], indent=1), flush=True)
    return store.put("layers", found)


# ---- tables --------------------------------------------------------------------------------------


def tables(store: Store, output: Path) -> None:
    """Means and deviations over seeds of what the store holds."""
    records = [json.loads(path.read_text()) for path in sorted(store.folder.glob("*.json"))]
    records = [record for record in records if "network" in record]
    for record in records:  # the machine stands once in the file
        kept = ("date", "load_average_1_minute")
        record["machine"] = {
            key: record["machine"][key] for key in kept if key in record["machine"]
        }
    runs = [record for record in records if record["seed"] != CHOOSING]
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in runs:
        for limit in limits_of(record):
            group = groups.setdefault(f"{record['data']}, {limit}", {})
            group.setdefault(record["network"], []).append(record)
    rows = [
        row_of(label, kind, group[kind])
        for label, group in sorted(groups.items())
        for kind in NAMES
        if kind in group
    ]
    header = ["Trained on, for", "Network", "Seeds", "Steps", "Seconds", "Clean"]
    header += [f"{number}/255" for number in (36, 72, 108)]
    found = {"runs": markdown_table([*header, "Answers changed inside", "Bound of the body"], rows)}
    times = store.get("layers") or {}
    sizes = [key for key in times if "channels" in key]
    if sizes:
        header = ["Layer", *(f"{size}, {unit}" for size in sizes for unit in ("ms", "of plain"))]
        cells = [
            [name, *(form for size in sizes for form in shown(times[size][name]))]
            for name in times[sizes[0]]
        ]
        found["layers"] = markdown_table(header, cells)
    print("\n\n".join(found.values()))
    title = "Certified accuracy, per cent of 2,000 test images; layers' times on 128 images"
    content: dict[str, Any] = {"title": title, "machine": machine(packages=PACKAGES)}
    content["leads"] = {label: leads(group) for label, group in groups.items()}
    print(json.dumps(content["leads"], indent=1))
    searched = [record for record in records if record["seed"] == CHOOSING]
    content |= {"tables": found, "layers": times, "runs": runs, "searched": searched}
    write_json(output, content)


def shown(entry: dict[str, Any]) -> tuple[str, str]:
    return f"{entry['ms']:.1f}", f"{entry['of_plain']:.2f}"


def limits_of(record: dict[str, Any]) -> list[str]:
    """Where a run counts: at equal time, at equal steps, or both."""
    width = f", {record['width']} channels" if "width" in record else ""
    texts = {"seconds": "{:g} s", "steps": "{:,} steps"}
    return [text.format(record[key]) + width for key, text in texts.items() if key in record]


def of_one_rate(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs at the learning rate that most of them have: an earlier one may be on file."""
    rate = statistics.mode(member["rate"] for member in members)
    return [member for member in members if member["rate"] == rate]


def leads(group: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By how many points each of ours is ahead at 36/255, and the standard error."""
    found = {}
    values = {
        kind: [each["accuracy"][1] for each in of_one_rate(members)]
        for kind, members in group.items()
    }
    for our, their in itertools.product(OURS, ("torchlip", "AOC")):
        if our in values and their in values:
            pair = values[our], values[their]
            first, second = map(statistics.fmean, pair)
            has_error = min(map(len, pair)) > 1
            squares = [statistics.variance(each) / len(each) for each in pair] if has_error else []
            error = math.sqrt(sum(squares)) if has_error else None
            found[f"{our} over {their}"] = {"points": first - second, "standard_error": error}
    return found


def row_of(label: str, kind: str, members: list[dict[str, Any]]) -> list[str]:
    """One row of the table: the runs of all seeds of a network."""
    members = of_one_rate(members)
    cells = []
    for place in range(len(RADII)):
        values = [member["accuracy"][place] for member in members]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        cells.append(f"{statistics.fmean(values):.1f}{spread}")
    steps = statistics.fmean(member["trained_steps"] for member in members)
    seconds = statistics.fmean(member["trained_seconds"] for member in members)
    attacks = [member["attack"] for member in members if "attack" in member]
    inside = [f"{each['inside']} of {each['images']:,}" for each in attacks]
    bound = max(member["bound_of_body"] for member in members)
    row = [label, NAMES[kind], str(len(members)), f"{steps:,.0f}", f"{seconds:.0f}", *cells]
    return [*row, ", ".join(inside) or "-", f"{bound:.6f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    stages = ("search", *LIMITS, "layers", "tables")
    add("--stage", nargs="+", choices=stages, default=stages)
    add("--data", choices=("cifar10", "mnist"), default="cifar10")
    add("--data-dir", type=Path, default=Path("data"))
    add("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    add("--search-steps", type=int, default=0, help="search at equal steps, batches of 128")
    add("--seconds", type=float, default=600.0, help="of one thread, in the stage of equal time")
    add("--steps", type=int, default=3000, help="in the stage of equal steps")
    add("--search-seconds", type=float, default=20.0)
    add("--width", type=int, default=WIDTH, help="channels of the first stage")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--rounds", type=int, default=20, help="of the timing of layers")
    add("--folder", type=Path, default=Path("runs/certified"))
    add("--output", type=Path, default=RESULTS / "certified.json")
    options = parser.parse_args()
    one_thread()
    warnings.simplefilter("ignore")
    store = Store(options.folder)
    store.restore(options.output)
    if "layers" in options.stage:
        layers(store, options.rounds)
    if {"search", *LIMITS} & set(options.stage):
        data = Data(options.data, options.data_dir)
        wanted = options.networks
        width = {"width": options.width} if options.width != WIDTH else {}
        chosen: dict[str, dict[str, Any]] = {}
        for kind in wanted:
            usual = {"rate": USUAL[kind], "batch": 128}
            chosen[kind] = store.get(chosen_name(kind, data, width)) or usual
            if "search" in options.stage:
                steps = options.search_steps
                limit = {"steps": steps} if steps else {"seconds": options.search_seconds}
                chosen[kind] = search(kind, data, store, limit | width)
        for stage, counted in LIMITS.items():
            for seed in options.seeds if stage in options.stage else []:
                for kind in wanted:
                    limit = {key: getattr(options, key) for key in counted} | width
                    run(kind, data, {**chosen[kind], **limit, "seed": seed}, store)
    if "tables" in options.stage:
        tables(store, options.output)


if __name__ == "__main__":
    main()
