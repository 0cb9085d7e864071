"""Sentence pairs of `translation.py`: a small phrase generator, tab-separated files."""

import gzip
import itertools
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

Pair = tuple[list[str], list[str]]  # words of source and target

PAD, START, END, UNKNOWN = range(4)
SPECIAL = ["<pad>", "<start>", "<end>", "<unknown>"]

# Subjects, and which form of the English and of the Spanish verb they take; nouns and their gender.
WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))


def generated_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Distinct phrases whose translation needs agreement, conjugation and another order."""
    subjects, verbs, *others = WORDS.values()
    everything = itertools.product(subjects, (False, True), verbs, *others)
    pairs = []
    for (he, el, english, spanish), negated, verb, article, noun, adjective, time in everything:
        gender = noun[2]
        does = (["do", "does"][english], "not", verb[0][0]) if negated else (verb[0][english],)
        source = [he, *does, article[0], adjective[0], noun[0], time[0]]
        hace = ("no",) if negated else ()
        target = [el, *hace, verb[1][spanish], article[1][gender], noun[1], adjective[1][gender]]
        pairs.append((" ".join(source).split(), " ".join([*target, time[1]]).split()))
    random.Random(seed).shuffle(pairs)
    return pairs[:count]


def words(text: str) -> list[str]:
    """Lower-case words and punctuation marks without accents."""
    plain = unicodedata.normalize("NFKD", text.lower())
    return re.findall(r"\w+|[^\w\s]", "".join(c for c in plain if not unicodedata.combining(c)))


def read_pairs(path: Path, longest: int) -> list[Pair]:
    """Lines ``source<TAB>target``, packed (.gz) or not, of at most ``longest`` words a side."""
    if not path.is_file():
        raise SystemExit(
            f"--pairs must be a file of lines source<TAB>target (.gz as well), got {str(path)!r}; "
            "Tatoeba's pairs are at https://www.manythings.org/anki/"
        )
    pairs = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for line in file:
            sides = [words(side) for side in line.rstrip("\n").split("\t")[:2]]
            if len(sides) == 2 and all(0 < len(side) <= longest for side in sides):
                pairs.append((sides[0], sides[1]))
    if not pairs:
        raise SystemExit(f"--pairs must hold lines source<TAB>target, got none in {str(path)!r}")
    return pairs


def split(pairs: Iterable[Pair], seed: int = 0, held_out: float = 0.2) -> tuple[list[Pair], ...]:
    """Training and test pairs; all translations of one source are on the same side."""
    sources: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        sources.setdefault(tuple(pair[0]), []).append(pair)
    keys = sorted(sources)
    random.Random(seed).shuffle(keys)
    border = max(1, round(held_out * len(keys)))
    parts = (keys[border:], keys[:border])
    return tuple([pair for key in part for pair in sources[key]] for part in parts)


def vocabulary(sentences: Iterable[Sequence[str]], fewest: int) -> dict[str, int]:
    """Numbers of the words that occur at least ``fewest`` times."""
    counts = Counter(word for sentence in sentences for word in sentence)
    kept = sorted(word for word, count in counts.items() if count >= fewest)
    return {word: number for number, word in enumerate([*SPECIAL, *kept])}


def encode(sentence: Sequence[str], numbers: dict[str, int]) -> list[int]:
    """The numbers of the words and of the end."""
    return [numbers.get(word, UNKNOWN) for word in sentence] + [END]
