"""Machines: the only file that asks where a tensor lives, whether code is traced, what may be read.

A step may choose its work by a number, if that can be read. :class:`HostReader` reads it, on a CPU,
where reading is free. :class:`LaggedReader` knows the number of the step before, which the device
has copied while the host went on. :class:`BlindReader` knows nothing: a captured graph would freeze
what it read.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from stiefel_opt.errors import HALF, check_type, fail

_LONG: Final = 4096  # places of an index that is not kept
_MANY: Final = 1024  # rows of numbers that are kept
_SLOTS: Final = 32  # steps by which a device may be behind the host
_NUMBERS: Final[dict[tuple[torch.device, tuple[float, ...], torch.dtype], Tensor]] = {}
_LOOSE: Final = 4.0  # a bound on a number may be that much above it
_RING: Final = 8  # numbers that are on their way to captured steps

MapT = TypeVar("MapT", bound=Callable[..., Any])


# ---- where -------------------------------------------------------------------------------------


# Whether this code is being traced by ``torch.compile`` or exported.
is_compiling: Final = torch.compiler.is_compiling
# The same of the compiler alone, which every read of a watched parameter can afford.
is_in_dynamo: Final = torch.compiler.is_dynamo_compiling


def is_followed() -> bool:
    """Say whether code is traced, or transformed by ``torch.func`` or forward differentiation."""
    if is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    is_forward = torch.autograd.forward_ad._current_level >= 0
    return is_forward or torch._C._functorch.peek_interpreter_stack() is not None


def untraced(function: MapT) -> MapT:
    """Decorator: a function that does nothing while code is traced, and then returns None."""

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        return None if is_compiling() else function(*arguments)

    return cast("MapT", wrapped)


def is_cpu(tensor: Tensor) -> bool:
    """Say whether a tensor lives on the CPU, so that it is read without waiting."""
    return _is_on_cpu(tensor) and not isinstance(tensor, FakeTensor)


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.is_cpu  # tests put another answer here: is_cpu itself is imported by name


def for_device(tensor: Tensor, on_cpu: float, elsewhere: float) -> float:
    """Return the one of two numbers that is meant for the device of a tensor."""
    return on_cpu if is_cpu(tensor) else elsewhere


def lives_on(tensor: Tensor, kind: str) -> bool:
    """Say whether a tensor lives on this kind of device: offloaded shards cannot be gathered."""
    return tensor.device.type == kind


def finest_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 or complex128, or the finest dtype that the device of a tensor has."""
    if tensor.device.type == "mps":
        return torch.complex64 if tensor.is_complex() else torch.float32
    return torch.complex128 if tensor.is_complex() else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are worked on: float32 for half precision."""
    return torch.float32 if dtype in HALF else dtype


def widened(value: Tensor) -> Tensor:
    """Return a tensor of half precision in float32, anything else as it is."""
    is_half = isinstance(value, Tensor) and value.dtype in HALF
    return value.float() if is_half else value


def may_wait_for(tensor: Tensor) -> bool:
    """Say whether a value may be waited for: not while code is traced or a graph is captured."""
    if is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def has_values(tensor: Tensor) -> bool:
    """Say whether a tensor has values to read: not on the meta device, nor a fake one."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def index_on(device: torch.device, places: Sequence[int]) -> Tensor:
    """Return an index in the memory of a device, sent there once and without waiting.

    A list in its place would be sent, and waited for, at every use.
    """
    if device.type == "cpu" or len(places) > _LONG:
        return _sent(device, tuple(places), torch.long)
    return _kept_on(device, tuple(places), torch.long, is_plain=True)


def numbers_on(like: Tensor, *values: float) -> Tensor:
    """Return real numbers in the precision and on the device of a tensor, sent there once."""
    is_plain = type(like) is Tensor and torch._C._functorch.peek_interpreter_stack() is None
    return _kept_on(like.device, values, like.real.dtype, is_plain=is_plain)


def _kept_on(
    device: torch.device, values: tuple[float, ...], dtype: torch.dtype, *, is_plain: bool
) -> Tensor:
    key = device, values, dtype
    if is_plain and key in _NUMBERS:
        return _NUMBERS[key]
    if not has_no_owner(device):  # a graph that is being captured must not read the host
        return torch.stack([torch.full((), each, dtype=dtype, device=device) for each in values])
    numbers = _sent(*key)
    if len(_NUMBERS) < _MANY:  # none is dropped: a captured graph may use it
        _NUMBERS[key] = numbers
    return numbers


def has_no_owner(device: torch.device) -> bool:
    """Say whether a tensor that is made now may be kept: no graph, mode or transform owns it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    is_fake = torch.utils._python_dispatch._get_current_dispatch_mode() is not None
    return not is_fake and torch._C._functorch.peek_interpreter_stack() is None


def _sent(device: torch.device, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(mode=False):  # every caller shares it
        pinned = device.type == "cuda"
        numbers = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned)
        return numbers.to(device, non_blocking=device.type != "mps")  # pytorch/pytorch#189690


def readable(tensor: Tensor) -> Tensor | None:
    """Return the values of ``tensor`` where looking is free, on a CPU and not traced, else None."""
    return values_of(tensor) if is_cpu(tensor) else None


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of ``tensor``, waiting for them; None while traced or captured."""
    if not may_wait_for(tensor):
        return None
    return torch.func.debug_unwrap(tensor.detach(), recurse=True)


# ---- memory ------------------------------------------------------------------------------------


def address_for(tensors: Sequence[Tensor]) -> Callable[[Tensor], int]:
    """Return a function that gives the address of a tensor's values; ``id`` if it has none."""
    return torch.Tensor.data_ptr if all(map(has_values, tensors[:1])) else id


def span_of(tensor: Tensor) -> tuple[int, int] | None:
    """Return the addresses of the first byte of a tensor and behind its last; None without any."""
    if not has_values(tensor) or not tensor.numel() or tensor.layout is not torch.strided:
        return None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # of a subclass without memory of its own
        return None
    return start, start + (last + 1) * tensor.element_size()


def overlap(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors on one device, whose spans meet, have a byte in common."""
    spans = [span_of(tensor) for tensor in (one, other)]
    if None in spans:
        return False
    starts, stops = zip(*spans, strict=True)
    unit = math.gcd(starts[1] - starts[0], one.element_size(), other.element_size())
    memory = torch.zeros((max(stops) - min(starts)) // unit, dtype=torch.bool, device="cpu")
    for tensor, start in zip((one, other), starts, strict=True):
        width = tensor.element_size() // unit
        strides = [stride * width for stride in tensor.stride()]
        place = (start - min(starts)) // unit
        seen = memory.as_strided((*tensor.shape, width), (*strides, 1), place)
        if bool(seen.any()):
            return True
        seen.fill_(True)
    return False


def settle_allocator(tensor: Tensor) -> None:
    """Let glibc keep blocks of a few MB instead of returning them to the system at every free.

    It raises its threshold, for the whole process, when a larger block is freed; without that each
    temporary of a step on a CPU is faulted in page by page again, which for small matrices costs
    more than the arithmetic.
    """
    if is_cpu(tensor):
        _settle_allocator()


@functools.lru_cache(maxsize=1)
def _settle_allocator() -> None:
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


# ---- readers -----------------------------------------------------------------------------------


# Beyond this learning rate times gradient, eta |X'G|, rounding in X'X is removed after every step.
STEEP: Final = 0.26
# Up to here rounding is multiplied into no more than 1e-5 of an entry in float32.
_UNSEEN: Final = 30.0


class Hint(NamedTuple):
    """How a caller uses a number: below ``least`` as that; it grows as lr^``power``."""

    least: float = 0.0
    power: int = 0


NO_HINT: Final = Hint()


class Numbers(NamedTuple):
    """Rows of numbers that are asked for at once, with their names, units and hints."""

    names: tuple[str, ...]
    rows: Tensor
    units: tuple[float, ...]
    hints: tuple[Hint, ...] = ()


class Reader(ABC):
    """Reads sizes of tensors, by which a step chooses how much work it does.

    A rule asks, for instance, for a bound on its step before it plans an inverse root.
    """

    is_exact: bool = False  # what :meth:`number` returns is the number of this very step
    overflowed: bool = False  # a number that was read is not finite: the step is of no use
    steepest: float = math.inf  # the most that eta |X'G| may be where the device has to see to it
    steepness: float = math.inf  # what is known of it

    @abstractmethod
    def number(self, name: str, value: Callable[[], Tensor], hint: Hint = NO_HINT) -> float:
        """Return what is known of the largest entry of ``value()``; inf if nothing is.

        Args:
            name: The key of the stored number: use it once a step.
            value: Called only where its number is used.
            hint: How the caller uses it.
        """

    def numbers(self, asked: Numbers) -> Sequence[float]:
        """Return what is known of the largest finite number of each row times its unit.

        They are sent by one copy, and not negative; inf where there is none.
        """
        return [math.inf] * asked.rows.size(0)

    def limited(self, most: float) -> Reader:  # noqa: ARG002
        """Return a reader for one step, in which eta |X'G| may be ``most`` at the most."""
        return self

    def forget(self, name: str) -> None:  # noqa: B027 - most readers remember nothing
        """Drop a number of an earlier step that says nothing of the next one."""

    def same(self, name: str, numbers: Tensor) -> float | None:  # noqa: ARG002
        """Return the number that all entries equal; None if they differ, or if it is unknown."""
        return None

    def keep(self, name: str, number: float) -> None:  # noqa: B027
        """Remember the number that all entries equal after this step, for :meth:`same`."""


class HostReader(Reader):
    """Reads the numbers of this step: on a CPU."""

    is_exact = True

    @override
    def number(self, name: str, value: Callable[[], Tensor], hint: Hint = NO_HINT) -> float:
        return float(value().max())

    @override
    def numbers(self, asked: Numbers) -> Sequence[float]:
        return [
            unit * max((number for number in row if number < math.inf), default=math.inf)
            for row, unit in zip(asked.rows.tolist(), asked.units, strict=True)
        ]

    @override
    def same(self, name: str, numbers: Tensor) -> float | None:
        if numbers.numel() == 1:  # cheaper to read
            return float(numbers.item())
        least, most = torch.aminmax(numbers)
        return float(least) if least == most else None


class BlindReader(Reader):
    """Reads nothing, so that rounding is removed in every step."""

    @override
    def number(self, name: str, value: Callable[[], Tensor], hint: Hint = NO_HINT) -> float:
        return math.inf

    @override
    def limited(self, most: float) -> Reader:
        reader = BlindReader()
        reader.steepest = 0.1 * most  # rounding is removed once
        return reader


class _Ring:
    """Numbers of the last steps, as their copies arrive in memory of the host."""

    def __init__(self, rows: Tensor) -> None:
        dtype = rows.dtype if rows.dtype in (torch.float32, torch.float64) else torch.float64
        shape, pinned = (_SLOTS, *rows.shape), rows.is_cuda
        self._host = torch.full(shape, -1.0, dtype=dtype, device="cpu", pin_memory=pinned)
        self._memory: Any = self._host.numpy()  # reading it is no operation of torch, and no wait
        self._units: list[tuple[float, ...]] = [()] * _SLOTS
        self._sent = self._arrived = 0
        self._largest = [math.inf] * rows.size(0)
        self.overflowed = False  # whether a number was not finite, or may have been

    def fits(self, rows: Tensor) -> bool:
        """Say whether these are as many numbers."""
        return self._host.shape[1:] == rows.shape

    def look(self) -> list[float]:
        """Return the largest finite number of each row of the last step that has arrived."""
        while self._arrived < self._sent:
            slot = self._arrived % _SLOTS
            if (self._memory[slot] == -1.0).any():
                break
            sound = self._memory[slot] < math.inf
            self._largest = [
                unit * float(row.max(where=fine, initial=-1.0)) if fine.any() else math.inf
                for row, fine, unit in zip(
                    self._memory[slot], sound, self._units[slot], strict=True
                )
            ]
            self.overflowed |= not sound.all()
            self._arrived += 1
        return self._largest

    def send(self, rows: Tensor, units: tuple[float, ...]) -> None:
        """Begin to copy the numbers of this step, unless the device is far behind."""
        if self._sent - self._arrived < _SLOTS:
            slot = self._sent % _SLOTS
            self._memory[slot], self._units[slot] = -1.0, units
            self._host[slot].copy_(rows, non_blocking=True)
            self._sent += 1
        else:
            self.overflowed = True


class LaggedReader(Reader):
    """Knows the numbers of the step before: the device copies them to the host in its own time.

    What is returned are the last numbers whose copy has arrived; a margin is left to the caller.
    Numbers of the host that all matrices have in common, such as counts of their steps, are kept
    until it learns that a matrix was left out. That is one step late, or two. From then on they are
    numbers of the device, until the host waits in any case: when a checkpoint is made. Weights of
    one batch that have missed different steps have none in common any more.
    """

    def __init__(self) -> None:
        self._rings: dict[tuple[str, ...], _Ring] = {}
        self._kept: dict[str, float] = {}
        self._may_wait = True

    @override
    def same(self, name: str, numbers: Tensor) -> float | None:
        for ring in self._rings.values():
            ring.look()
            if ring.overflowed:
                self.part()
                ring.overflowed = False
        if name not in self._kept and self._may_wait:
            number = HostReader.same(_HOST, name, numbers)
            if number is None:
                self.part()
            else:
                self._kept[name] = number
        return self._kept.get(name)

    @override
    def keep(self, name: str, number: float) -> None:
        self._kept[name] = number

    def part(self, *, may_wait: bool = False) -> None:
        """Drop the numbers that matrices had in common; they are read again if one may wait."""
        self._kept.clear()
        self._may_wait = may_wait

    @override
    def number(self, name: str, value: Callable[[], Tensor], hint: Hint = NO_HINT) -> float:
        return self.numbers(Numbers((name,), value().reshape(1, -1), (1.0,)))[0]

    @override
    def numbers(self, asked: Numbers) -> Sequence[float]:
        ring = self._rings.get(asked.names)
        earlier = [math.inf] * len(asked.names) if ring is None else ring.look()
        self.send(asked)
        return earlier

    @override
    def limited(self, most: float) -> Reader:
        # Rounding behind a step is removed as often as the one before asks for: the limit is low
        # unless that one was steep.
        self.steepness = self.known("norm", Hint(STEEP))
        is_known = self.steepness < math.inf
        self.steepest = min(max(_UNSEEN, 4.0 * self.steepness), most) if is_known else most
        return self

    @override
    def forget(self, name: str) -> None:
        self._rings.pop((name,), None)  # a copy to it may be on its way

    def send(self, asked: Numbers) -> None:
        """Begin to copy the numbers of a step."""
        ring = self._rings.get(asked.names)
        if ring is None or not ring.fits(asked.rows):
            ring = self._rings[asked.names] = _Ring(asked.rows)
        ring.send(asked.rows, asked.units)

    def known(self, name: str, hint: Hint = NO_HINT) -> float:  # noqa: ARG002
        """Return the number of an earlier step; inf if there is none."""
        found = [
            ring.look()[names.index(name)] for names, ring in self._rings.items() if name in names
        ]
        return found[0] if found else math.inf


class PlannedReader(LaggedReader):
    """Answers for a step that is captured: bounds on what a :class:`LaggedReader` would answer.

    The captured step may be repeated for as long as they :meth:`still_hold`. Its learning rate is a
    tensor, which the host may know: what grows with it is kept for a learning rate of 1.
    """

    def __init__(self, lagged: LaggedReader, lr: float | None) -> None:
        super().__init__()
        self._lagged, self._lr = lagged, lr
        # eager steps keep numbers of the same name in another unit
        self._prefix = "captured " if lr is None else "captured, per learning rate, "
        self._given: dict[str, tuple[Hint, float]] = {}  # answers
        self._found: dict[tuple[str, ...], Numbers] = {}
        self._forgotten: set[str] = set()

    @override
    def numbers(self, asked: Numbers) -> Sequence[float]:
        hints = (*asked.hints, *[NO_HINT] * (len(asked.names) - len(asked.hints)))
        self._found[asked.names] = asked._replace(hints=hints)
        return [self.known(name, hint) for name, hint in zip(asked.names, hints, strict=True)]

    @override
    def known(self, name: str, hint: Hint = NO_HINT) -> float:
        if name not in self._given:
            known, least = self._known(name, hint), max(hint.least, 2.0**-200)
            answer = max(known, least)
            if least < known < math.inf:  # a power of 2 above
                answer = least * 2.0 ** math.ceil(math.log2(known / least))
            self._given[name] = hint._replace(least=least), answer
        return self._given[name][1]

    @override
    def same(self, name: str, numbers: Tensor) -> float | None:
        return None  # a graph would freeze it

    @override
    def forget(self, name: str) -> None:
        self._forgotten.add(name)

    def still_hold(self, lr: float | None) -> bool:
        """Say whether every answer is a bound still, and not a loose one."""
        self._lr = lr
        for name, (hint, answer) in self._given.items():
            known = max(self._known(name, hint), hint.least)
            if not (known == answer or known <= answer <= _LOOSE * known):
                return False
        return True

    def pass_on(self) -> None:
        """Begin to copy the numbers of the step that the device has been given."""
        self._lagged.part()  # what it keeps is of eager steps
        for name in self._forgotten:
            self._lagged.forget(self._prefix + name)
        for asked in self._found.values() if self._lr != 0 else ():
            pairs = zip(asked.units, asked.hints, strict=True)
            units = tuple(unit / (self._lr or 1.0) ** hint.power for unit, hint in pairs)
            names = tuple(self._prefix + name for name in asked.names)
            self._lagged.send(Numbers(names, asked.rows, units))

    def _known(self, name: str, hint: Hint) -> float:
        number = self._lagged.known(self._prefix + name)
        return number * self._lr**hint.power if self._lr else number


_BLIND: Final = BlindReader()
_HOST: Final = HostReader()


def reader_for(tensor: Tensor, lagged: LaggedReader | None = None) -> Reader:
    """Return the reader for a step on ``tensor``; ``lagged`` remembers earlier steps."""
    if isinstance(lagged, PlannedReader):
        return lagged
    if is_compiling() or not has_values(tensor):
        return _BLIND
    if is_cpu(tensor):
        return HostReader()
    if lagged is None or torch.are_deterministic_algorithms_enabled():
        return _BLIND
    if tensor.is_cuda:
        return _BLIND if torch.cuda.is_current_stream_capturing() else lagged
    return lagged if tensor.is_cpu else _BLIND  # without pinned memory a copy would wait


# ---- captured steps ------------------------------------------------------------------------------

_CUDA: Any = torch.cuda  # some of its classes have no types


class Recorder:
    """Captures work on a CUDA device as graphs, and sends a number of the host to them.

    Args:
        device: Where the work is done.
        shared: What recorders of work that never runs at once have in common: temporaries.

    Attributes:
        number: What was sent last, float64.
    """

    def __init__(self, device: torch.device, shared: dict[Any, Any]) -> None:
        self._device, self._shared = device, shared
        self.number = torch.zeros((), dtype=torch.float64, device=device)
        self._sent: float | None = None
        self._ring: list[tuple[Tensor, Any]] = []  # a copy on its way needs memory of its own
        self._turn = 0
        self._last_stream: Any = None

    @staticmethod
    def is_busy() -> bool:
        """Say whether another capture, which this step is part of, is under way."""
        return torch.cuda.is_current_stream_capturing()

    def follow(self) -> None:
        """Let the current stream wait for the one on which the last step was sent."""
        current = torch.cuda.current_stream(self._device)
        if self._last_stream is not None and current != self._last_stream:
            current.wait_stream(self._last_stream)
        self._last_stream = current

    def send(self, number: float | None) -> None:
        """Send a number that has changed, without waiting; None: it is there."""
        if number is not None and number != self._sent:
            host, arrived = self._slot()
            host.fill_(number)
            self.number.copy_(host, non_blocking=True)
            if arrived is not None:
                arrived.record(torch.cuda.current_stream(self._device))
        self._sent = number

    def _slot(self) -> tuple[Tensor, Any]:
        """Return memory that pages stay in, and the event that says when it has been read."""
        is_cuda = self._device.type == "cuda"
        if len(self._ring) < _RING:
            host = torch.zeros((), dtype=torch.float64, device="cpu", pin_memory=is_cuda)
            self._ring.append((host, _CUDA.Event() if is_cuda else None))
            return self._ring[-1]
        host, arrived = self._ring[self._turn % _RING]
        self._turn += 1
        if arrived is not None:
            arrived.synchronize()  # the host is eight changes ahead
        return host, arrived

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        """Capture ``work``, which does not run yet, and return what runs it."""
        device, graph = self._device, torch.cuda.CUDAGraph()
        if device not in self._shared:
            self._shared[device] = _CUDA.Stream(device), weakref.WeakSet()
        stream, alive = self._shared[device]
        # memory of graphs that are gone must not be asked for
        pool = next((other.pool() for other in alive), None)
        # torch leaves the stream of a capture that fails as the current one
        with torch.cuda.device(device), torch.cuda.stream(stream):
            mode = "thread_local"  # other threads may go on
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                work()
        alive.add(graph)
        return graph.replay


# By type of device.
RECORDERS: Final[dict[str, type[Recorder]]] = {"cuda": Recorder}


def recorder_for(tensor: Tensor) -> type[Recorder] | None:
    """Return what captures work on the device of a tensor; None where nothing does."""
    return RECORDERS.get(tensor.device.type)


# ---- precision ---------------------------------------------------------------------------------

_MKLDNN: Any = torch.backends.mkldnn
_BACKENDS: Any = (torch.backends.cuda.matmul, _MKLDNN.matmul)
_EXACT = ("none", "ieee")  # settings that keep all digits: the default, and full precision
# What the backends ask, without the exception that each of their attributes begins with.
_PRECISION: Any = torch._C._get_fp32_precision_getter
_NOTHING: Final = contextlib.nullcontext()
_LOCK: Final = threading.Lock()
# For each step that needs the highest precision, the function that ends it for all.
_SUSPENDED: Final[list[Callable[[], None]]] = []


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products of tensors like this one keep their dtype."""
    kind = tensor.device.type
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    if known and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING


def exact_products(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products of tensors like this one keep all digits of their dtype.

    Neither autocast nor ``torch.set_float32_matmul_precision`` (TF32, bfloat16) acts; X'X = I would
    hold to 1e-3 only. The precision belongs to the process: steps of several threads share one
    suspension, and the last of them ends it.
    """
    is_exact = _PRECISION("cuda", "matmul") in _EXACT and _PRECISION("mkldnn", "matmul") in _EXACT
    if is_exact and not _SUSPENDED:
        return no_autocast(tensor)
    return _suspended(tensor)


def _raised_precision() -> Callable[[], None]:
    """Set the precision of products to the highest, and return the function that undoes it."""
    legacy = _legacy_precision()
    if legacy:
        torch.set_float32_matmul_precision("highest")
        return functools.partial(torch.set_float32_matmul_precision, legacy)
    earlier = [backend.fp32_precision for backend in _BACKENDS]
    for backend in _BACKENDS:
        backend.fp32_precision = "ieee"

    def restore() -> None:
        for backend, value in zip(_BACKENDS, earlier, strict=True):
            backend.fp32_precision = "none"  # what a more general setting says
            if backend.fp32_precision != value:
                backend.fp32_precision = value

    return restore


def _legacy_precision() -> str | None:
    """Return the precision by its older name; None if the newer ones were used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns once of the older name
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # set for some backends only
            return None


@contextlib.contextmanager
def _suspended(tensor: Tensor) -> Iterator[None]:
    """Hold the precision of products at the highest for as long as any thread needs it."""
    with _LOCK:
        _SUSPENDED.append(_SUSPENDED[0] if _SUSPENDED else _raised_precision())
    try:
        with no_autocast(tensor):
            yield
    finally:
        with _LOCK:
            restore = _SUSPENDED.pop()
            if not _SUSPENDED:
                restore()


def full_precision(function: MapT) -> MapT:
    """Decorator: run in float32 under autocast and for half-precision tensors.

    A tensor that comes back has the dtype of the first argument, which must be one with a fraction.
    """
    leading = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not arguments and leading not in options:
            return function(**options)  # raises, and says what is missing
        first = arguments[0] if arguments else options[leading]
        check_type(leading, first, Tensor, "be a tensor")
        if not (first.is_floating_point() or first.is_complex()):
            raise TypeError(fail(leading, "have a floating-point dtype", first.dtype))
        with no_autocast(first):
            wide = {name: widened(value) for name, value in options.items()}
            result = function(*(widened(argument) for argument in arguments), **wide)
            return result.to(first.dtype) if isinstance(result, Tensor) else result

    return cast("MapT", wrapped)
