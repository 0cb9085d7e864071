"""The model of `translation.py`: two recurrences and attention between them.

Attention is "luong", score h' W s after the recurrence, so that one call reads all words; or
"additive", v' tanh(W1 s + W2 h) of the state before, whose context enters the recurrence with the
word: as drawn in figure 5 of Likhosherstov et al. (AISTATS 2021), one call a word.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.papers.likhosherstov.phrases import PAD
from stiefel_opt.nn import OrthogonalRNN

FREE = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
MAPS = {
    "SCORNN": "cayley",
    "EXPRNN": "matrix_exp",
    "StiefelAdam": "tagged",
    "ProjectedRGD": "tagged",
}


def recurrence(title: str, inputs: int, hidden: int) -> nn.Module:
    """The recurrence of one row; SCORNN has the paper's D = I, which Helfrich's start can reach."""
    if title in FREE:
        return FREE[title](inputs, hidden)
    options = {"transition": MAPS.get(title, "cwy")}
    if title == "SCORNN":
        options |= {"negative": 0, "start": "helfrich"}
    if title not in MAPS:
        options["reflections"] = int(title.removeprefix("CWY L="))
    return OrthogonalRNN(inputs, hidden, nonlinearity="abs", **options)


class Translator(nn.Module):
    """Numbers of source words (S, count) and of target words (T, count) to logits."""

    def __init__(
        self, title: str, sources: int, targets: int, embedding: int, hidden: int, attention: str
    ) -> None:
        super().__init__()
        self.additive = attention == "additive"
        self.read = nn.Embedding(sources, embedding, PAD)
        self.write = nn.Embedding(targets, embedding, PAD)
        self.encoder = recurrence(title, embedding, hidden)
        self.decoder = recurrence(title, embedding + hidden * self.additive, hidden)
        self.score = nn.Linear(hidden, hidden, bias=False)  # W, or W2
        if self.additive:
            self.keys = nn.Linear(hidden, hidden, bias=False)
            self.weigh = nn.Linear(hidden, 1, bias=False)
        else:
            self.join = nn.Linear(2 * hidden, hidden)
        self.answer = nn.Linear(hidden, targets)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States of all source words, which of them are padding, and the last state."""
        lengths = (source != PAD).sum(0).cpu()
        packed = pack_padded_sequence(self.read(source), lengths, enforce_sorted=False)
        states, last = self.encoder(packed)
        return pad_packed_sequence(states)[0], source == PAD, last

    def decode(
        self, target: Tensor, states: Tensor, padding: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What each target word leaves, to be read out by ``answer``, and the last state."""
        words = self.write(target)
        if self.additive:
            return self.decode_word_by_word(words, states, padding, last)
        hidden, last = self.decoder(words, last)
        scores = torch.einsum("tbh,sbh->bts", self.score(hidden), states)
        scores = scores.masked_fill(padding.T.unsqueeze(1), -math.inf)
        context = torch.einsum("bts,sbh->tbh", scores.softmax(-1), states)
        return torch.tanh(self.join(torch.cat([hidden, context], dim=-1))), last

    def decode_word_by_word(
        self, words: Tensor, states: Tensor, padding: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        keys, outputs = self.keys(states), []
        for word in words:
            before = (last[0] if isinstance(last, tuple) else last)[-1]
            scores = self.weigh(torch.tanh(keys + self.score(before))).squeeze(-1)
            shares = scores.masked_fill(padding, -math.inf).softmax(0)
            context = torch.einsum("sb,sbh->bh", shares, states)
            output, last = self.decoder(torch.cat([word, context], -1).unsqueeze(0), last)
            outputs.append(output)
        return torch.cat(outputs), last

    def forward(self, source: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
        """Logits (wanted words, vocabulary): the read-out costs most, and padding needs none."""
        return self.answer(self.decode(target, *self.encode(source))[0][wanted])
