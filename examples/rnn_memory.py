"""Remember five digits over a pause of 100 steps: the same cell with an orthogonal transition and
unconstrained, at two learning rates, and an LSTM.

    python examples/rnn_memory.py      # under a minute on one core; needs nothing but torch
"""

import torch
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.nn import OrthogonalRNN

PAUSE = 100
STEPS = 100
DIGITS, UNITS, BATCH = 5, 64, 64


class Model(nn.Module):
    """A recurrent network that reads the whole sequence; the answer is read at its end."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent, self.readout = recurrent, nn.Linear(UNITS, 8)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.readout(self.recurrent(sequence)[0][:, -DIGITS:])


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Digits 0 to 7, blanks (8), a mark (9), blanks in which the digits are to be repeated."""
    digits = torch.randint(8, (count, DIGITS))
    sequence = torch.full((count, PAUSE + 2 * DIGITS), 8)
    sequence[:, :DIGITS] = digits
    sequence[:, -DIGITS - 1] = 9
    return nn.functional.one_hot(sequence, 10).float(), digits


def train(title: str, recurrent: nn.Module, rate: float) -> None:
    """Train with one learning rate, then say how many digits of new sequences are right."""
    model = Model(recurrent)
    tagged = getattr(recurrent, "transition", None) == "tagged"
    optimizer = (so.StiefelAdam if tagged else torch.optim.Adam)(model.parameters(), lr=rate)
    for _ in range(STEPS):
        sequence, digits = batch(BATCH)
        loss = nn.functional.cross_entropy(model(sequence).flatten(0, 1), digits.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        sequence, digits = batch(512)
        right = (model(sequence).argmax(2) == digits).float().mean().item()
    print(f"{title:26}learning rate {rate:<7}{right:5.0%} of the digits  {'█' * round(30 * right)}")


def cell(transition: str | None) -> OrthogonalRNN:
    """For memory: modReLU and Henaff's initialisation; the transition is the only difference."""
    options = {"nonlinearity": "modrelu", "start": "henaff", "batch_first": True}
    return OrthogonalRNN(10, UNITS, transition=transition, **options)


torch.set_num_threads(1)
print(f"Repeat {DIGITS} digits after {PAUSE} steps; guessing gets one in eight.\n")
for rate in (0.003, 0.01):
    for title, transition in (
        ("orthogonal transition", "tagged"),
        ("unconstrained transition", None),
    ):
        torch.manual_seed(0)
        train(title, cell(transition), rate)
torch.manual_seed(0)
train("LSTM", nn.LSTM(10, UNITS, batch_first=True), 0.01)
print("""
What to see: at the smaller learning rate both cells remember, at the larger one only the orthogonal
cell: it cannot explode, so it forgives the learning rate. The LSTM would need many more steps.""")
