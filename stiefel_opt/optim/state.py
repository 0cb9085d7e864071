"""Which state a constrained parameter has: declared by its rule, completed and converted here.

Each constrained range of a parameter has state of its own; from the second range on its name ends
with the number of the range: ``momentum_skew``, ``momentum_skew.1``. For plain rows, which follow
torch's own rule, names begin with ``rows.``. Half-precision parameters have a float32
``master``. bfloat16 has 8 bits: a step of 1e-3 would vanish, and X'X = I could not hold to more.
So the point lives in float32 in the state, and the parameter is that point rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.errors import HALF, check_choice, fail
from stiefel_opt.numerics import linalg
from stiefel_opt.numerics.device import working_dtype
from stiefel_opt.numerics.distributed import local_part
from stiefel_opt.optim.sharding import Shards
from stiefel_opt.tags.manifold import Stiefel

StateDict = dict[str, Any]

MASTER: Final = "master"
# The start of a learned scale, to which it is pulled back; negative until a step has written it.
START: Final = "scale_start"
ROWS: Final = "rows."
_SHAPES: Final = ("nm", "mm", "nn", "1", "4")
_SQUARE: Final = ("mm", "nn")
_SHAPE_OF: Final = {"skew": _SQUARE, "symmetric": _SQUARE, "normal": ("nm",)}
MOMENTS_OF_TORCH: Final = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class State:
    """A tensor that a rule keeps for every constrained matrix, beside ``step``.

    Args:
        name: Its key in ``optimizer.state[parameter]``; not one of torch's own.
        shape: "nm", like the tall matrix; "mm"; "nn", which weights refuse whose rows are on
            several processes; "1", one number, or "4", a row of four.
        start: Its first value: a number, or "I" for the identity of "mm" or "nn".
        dtype: None, that of the point, or "real".
        symmetry: What holds for it: "skew", "symmetric", "normal", or None. A loaded tensor is
            replaced by its skew or symmetric part. "normal" is X'U = 0, normal to the span of X: a
            part of a tangent vector, and not of the normal space of the manifold. Such state has
            rounding removed with X, and does not exist for square matrices.
        tall_only: It does not exist for square matrices.
        least: Its least value: a loaded tensor with an entry below is refused.
        unit: What it is measured in, any word: where an option changes it, the state starts again.
        of_scale: It exists only for matrices whose scale is learned.

    Raises:
        ValueError: for other shapes, symmetries and dtypes, and for those that do not go together:
            "I", skew and symmetric need "mm" or "nn", normal needs "nm"; for names that torch has.
    """

    name: str
    shape: str = "nm"
    start: float | str = 0.0
    dtype: str | None = None
    symmetry: str | None = None
    tall_only: bool = False
    least: float = -math.inf
    unit: str | None = None
    of_scale: bool = False

    def __post_init__(self) -> None:
        check_choice("shape", self.shape, _SHAPES)
        if self.symmetry is not None:
            check_choice("symmetry", self.symmetry, tuple(_SHAPE_OF))
            check_choice(f"shape of {self.symmetry} state", self.shape, _SHAPE_OF[self.symmetry])
        if self.dtype is not None:
            check_choice("dtype", self.dtype, ("real",))
        if isinstance(self.start, str):
            check_choice("start", self.start, ("I",))
            check_choice("shape of state that starts as I", self.shape, _SQUARE)
        if self.name in (*MOMENTS_OF_TORCH, "step", MASTER, START) or "." in self.name:
            remedy = "choose another: torch or this package has it"
            raise ValueError(fail("name", "be a name of its own without a dot", self.name, remedy))
        if self.symmetry == "normal":
            object.__setattr__(self, "tall_only", True)

    @property
    def is_tall(self) -> bool:
        """Whether it is shaped, and stored, like the tall matrix."""
        return self.shape == "nm"

    @property
    def is_matrix(self) -> bool:
        """Whether it is one, and not some numbers."""
        return self.shape in ("nm", *_SQUARE)

    def exists_for(self, n: int, m: int, learns_scale: bool = False) -> bool:
        """Say whether matrices of n x m have it."""
        return (n > m or not self.tall_only) and (learns_scale or not self.of_scale)

    def shape_for(self, *lead: int, n: int, m: int) -> torch.Size:
        """Return its shape for tall matrices ``(*lead, n, m)``."""
        sizes = {"nm": (n, m), "mm": (m, m), "nn": (n, n), "1": (1, 1), "4": (1, 4)}
        return torch.Size((*lead, *sizes[self.shape]))

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return its dtype for a parameter of ``dtype``."""
        working = working_dtype(dtype)
        return working.to_real() if self.dtype == "real" else working

    def fill_(self, tensor: Tensor) -> Tensor:
        """Write the first value into a batch of it."""
        if self.start == "I":
            tensor.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
            return tensor
        return tensor.fill_(self.start)  # type: ignore[arg-type]

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the skew or symmetric part, where that is declared; up to rounding keep the bits.

        State of a copy then goes on bit for bit, whatever a rule rounds.
        """
        if self.symmetry not in ("skew", "symmetric"):
            return tensor
        part = linalg.skew(tensor) if self.symmetry == "skew" else linalg.sym(tensor)
        size, difference = map(linalg.frobenius_norm, (tensor, tensor - part))
        return torch.where(difference <= 1e2 * torch.finfo(tensor.dtype).eps * size, tensor, part)


LIKE_POINT: Final = State("point")  # how a master is declared, and a moment of torch


def declared_once(declared: Sequence[State]) -> dict[str, State]:
    """Return declarations by name; raise if two have the same one."""
    declarations = {declaration.name: declaration for declaration in declared}
    if len(declarations) < len(declared):
        names = sorted(declaration.name for declaration in declared)
        raise ValueError(fail("state_for", "return each name once", names))
    return declarations


def key_of(name: str, index: int) -> str:
    """Return the key of the state of range ``index``."""
    return f"{name}.{index}" if index else name


def restart(state: StateDict, earlier: Iterable[State], declared: Iterable[State]) -> bool:
    """Drop state that is declared otherwise than before under the same name; say if there was."""
    before = {each.name: each for each in earlier}
    changed = {each.name for each in declared if before.get(each.name, each) != each}
    dropped = [key for key in state if key.partition(".")[0] in changed]
    for key in dropped:
        del state[key]
    return bool(dropped)


def is_declared(key: str, names: Container[str]) -> bool:
    """Say whether a key is one of ours: of these ``names``, a master, or of plain rows."""
    return key.partition(".")[0] in names or key == MASTER or key.startswith(ROWS)


def complete_state(
    state: StateDict,
    declared: Sequence[State],
    parameter: Tensor,
    manifold: Stiefel,
    called: Callable[[], str],
    names: Container[str],
    shards: Shards | None = None,
) -> StateDict:
    """Make in ``state`` what is missing, and drop what the rule does not keep; raise for a shape.

    One of ``names`` is dropped: the rule keeps it by other options. What a user has put there
    stays. The state of a plain parameter starts anew. ``called`` returns the name of the parameter
    for a message.
    """
    expected = expected_state(declared, parameter, manifold)
    if any(name in state for name in MOMENTS_OF_TORCH):  # of a plain parameter until now
        state.clear()
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    if parameter.dtype in HALF and MASTER not in state:
        state[MASTER] = parameter.detach().to(torch.float32)
    for key, (declaration, shape) in expected.items():
        dtype = declaration.dtype_for(parameter.dtype)
        layout = None  # of m x m, which every process has whole
        if shards is not None:
            layout = shards.working if declaration.is_tall else shards.small
        if key not in state:
            if shards is None or layout is None:
                state[key] = torch.zeros(shape, dtype=dtype, device=parameter.device)
            else:
                state[key] = shards.zeros(shape, dtype, layout)
            if declaration.start != 0:
                declaration.fill_(local_part(state[key]))
        elif state[key].shape != shape:
            remedy = "load the state of a parameter of the same shape and reading"
            wanted, given = f"have shape {tuple(shape)}", f"shape {tuple(state[key].shape)}"
            raise ValueError(fail(f"{key} of {called()}", wanted, given, remedy))
        if state[key].dtype != dtype:  # the model is in another precision now
            state[key] = state[key].to(dtype)
        if shards is not None and layout is not None:
            state[key] = shards.placed(state[key], layout)
    for key in sorted(state.keys() - expected.keys()):
        if is_declared(key, names) and not key.startswith(ROWS):
            del state[key]
    return state


def expected_state(
    declared: Sequence[State], parameter: Tensor, manifold: Stiefel
) -> dict[str, tuple[State, torch.Size]]:
    """Return all state of a constrained parameter but ``step``: declaration and shape, by key."""
    expected: dict[str, tuple[State, torch.Size]] = {}
    model = torch.empty(parameter.shape, device="meta")
    for index, (part, reading) in enumerate(manifold.blocks(model)):
        *lead, n, m = reading.matrices(part).shape
        for declaration in declared:
            if declaration.exists_for(n, m, manifold.learn_scale):
                shape = (
                    part.shape if declaration.is_tall else declaration.shape_for(*lead, n=n, m=m)
                )
                expected[key_of(declaration.name, index)] = declaration, shape
    if parameter.dtype in HALF:
        expected[MASTER] = LIKE_POINT, parameter.shape
    return expected


# ---- masters -----------------------------------------------------------------------------------


def point_of(parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return what a constrained parameter stands for: its master, or its own value."""
    value = state.get(MASTER, parameter.detach())
    return value.to(working_dtype(value.dtype))


def follow_(master: Tensor, value: Tensor) -> None:
    """Let masters take the values that were written into their parameters.

    Keep the master where the parameter still equals its rounding.
    """
    same = master.to(value.dtype).view(torch.int16) == value.view(torch.int16)
    torch.where(same, master, value.to(master.dtype), out=master)
