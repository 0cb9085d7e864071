"""A vision transformer whose query and key weights are orthonormal within every head.

pip install scikit-learn
python examples/vit_attention.py        # half a minute on one core
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stiefel_opt as so

WIDTH, HEADS = 32, 4
EPOCHS = 12


class VisionTransformer(nn.Module):
    """8 x 8 pixels as 16 patches of 2 x 2; torch's own encoder; mean over the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.positions
        return self.classifier(self.encoder(tokens).mean(1))


def train(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(EPOCHS):
        for picked in torch.randperm(len(train_images)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(train_images[picked]), train_labels[picked]
            ).backward()
            optimizer.step()
    with torch.no_grad():
        right = (model.eval()(test_images).argmax(1) == test_labels).float().mean()
        query = model.encoder.layers[0].self_attn.in_proj_weight[: WIDTH // HEADS]  # first head
        values = torch.linalg.svdvals(query)
    print(f"{name}: {right:.1%} of the test images right")
    print(
        f"  singular values of the first head's queries: {values.min():.4f} to {values.max():.4f}"
    )


torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_images, test_images = images[:1437], images[1437:]
train_labels, test_labels = labels[:1437], labels[1437:]

torch.manual_seed(0)
model = VisionTransformer()
print(so.constrain_attention(model, "within"), "\n")  # what it found and what it did
groups = so.param_groups(model, plain={"weight_decay": 0.01}, lr=3e-3)
train("StiefelAdamW", model, so.StiefelAdamW(groups))
print(so.report(model), "\n")

torch.manual_seed(0)
model = VisionTransformer()
train("AdamW", model, torch.optim.AdamW(model.parameters(), lr=3e-3))
print("""
What to see: nothing is lost in accuracy, one optimizer and one rate train the whole model, and the
singular values of queries and keys stay exactly 1: these weights cannot enlarge a logit.""")
