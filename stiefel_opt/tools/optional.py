"""Optional packages, imported by the functions that need them."""

from __future__ import annotations

import importlib
from typing import Any

from typing_extensions import Self


def imported(module: str, package: str, otherwise: str = "") -> Any:
    """Return ``module`` of ``package``, or raise an ImportError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        remedy = f"run: pip install {package}{otherwise}"
        raise ImportError(f"{name} must be installed, got {error}; {remedy}") from error


class ProgressBar:
    """A bar of tqdm if ``shown``; with ``silent`` tqdm is required but nothing appears."""

    def __init__(self, total: int, shown: bool, *, silent: bool = False) -> None:
        tqdm = imported("tqdm", "tqdm", ", or pass progress=False") if shown else None
        self._bar = None if tqdm is None else tqdm.tqdm(total=total, unit="step", disable=silent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, steps: int = 1, note: str = "") -> None:
        """Count steps, with a note behind the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(steps)
