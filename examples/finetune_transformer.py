"""Fine-tune a model of transformers with orthonormal queries and keys; save it, load it back.

    pip install transformers scikit-learn
    python examples/finetune_transformer.py     # under a minute on one core, no download

A small ViT is trained on the digits 0 to 4 and stands for the pretrained model; the new task are
the digits 5 to 9. For a model of your own replace `folder / "pretrained"` by its name.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import stiefel_opt as so

try:
    from sklearn.datasets import load_digits
    from transformers import ViTConfig, ViTForImageClassification
except ImportError as error:
    sys.exit(f"This example needs more ({error}); run: pip install transformers scikit-learn")

EPOCHS, RATE = 15, 1e-3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, digits: range, epochs: int) -> None:
    images, labels = data(digits)[0]
    model.train()
    for _ in range(epochs):
        for picked in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            model(pixel_values=images[picked], labels=labels[picked]).loss.backward()
            optimizer.step()


@torch.no_grad()
def right(model: nn.Module, digits: range) -> str:
    images, labels = data(digits)[1]
    answers = model.eval()(pixel_values=images).logits.argmax(1)
    return f"{(answers == labels).float().mean():.1%} right"


def data(digits: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels of some digits, for training and for the test."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images, labels = images.float().view(-1, 1, 8, 8) / 16, labels - digits.start
    chosen = (labels >= 0) & (labels < len(digits))
    images, labels = images[chosen], labels[chosen]
    return [(images[:700], labels[:700]), (images[700:], labels[700:])]


torch.set_num_threads(1)
torch.manual_seed(0)
old, new = range(5), range(5, 10)
config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2,
    num_attention_heads=4, intermediate_size=64, num_labels=5,
)  # fmt: skip
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    model = ViTForImageClassification(config)
    train(model, torch.optim.AdamW(model.parameters(), lr=RATE), old, EPOCHS)
    print("pretrained, digits 0 to 4:", right(model, old))
    model.save_pretrained(folder / "pretrained")

    for scale in ("keep", 1.0):  # of the size that the weights had; orthonormal: try both
        model = ViTForImageClassification.from_pretrained(folder / "pretrained")
        report = so.constrain_attention(model, scale=scale)
        print(f"orthogonal queries and keys, scale {scale}, before training:", right(model, old))
    print(report)  # what it found and did
    optimizer = so.StiefelAdam(so.param_groups(model, lr=RATE))
    train(model, optimizer, new, EPOCHS)
    print("fine-tuned to the digits 5 to 9:", right(model, new))
    print(f"orthonormality error {so.orthonormality_error(model):.1e}")
    model.save_pretrained(folder / "tuned")
    again = ViTForImageClassification.from_pretrained(folder / "tuned")
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    print("loaded back with the same bits:", all(torch.equal(a, b) for a, b in pairs))
