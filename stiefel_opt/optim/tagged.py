"""What every optimizer of tagged parameters shares: how groups are admitted, names, words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stiefel_opt.optim import checks
from stiefel_opt.optim.torch_rules import Group
from stiefel_opt.tags.manifold import Stiefel


class TaggedOptimizer(Optimizer):
    """Base of optimizers whose groups hold constrained and plain parameters side by side.

    It has no step: :class:`StiefelOptimizer` has that of rules; a class with another loop, such as
    a line search, derives from this one, behind a class of torch if there is one.

    Args:
        params: Parameters, named parameters or groups, as in torch.
        defaults: Options of the groups, ``stiefel`` and ``nonfinite`` among them.

    Attributes:
        rule: The name under which a checkpoint is saved.
        learns_scale: Whether weights with a learned scale can be moved. Default: False, and such
            weights are refused.
    """

    rule: str = ""
    learns_scale: bool = False

    @override
    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        checks.name_options(cls)

    def __init__(self, params: Any, defaults: Group) -> None:
        self.rule = self.rule or type(self).__name__
        checks.check_params(params)
        super().__init__(params, defaults)

    def check_options(self, group: Group) -> None:
        """Raise unless the options of a group make sense; call ``super().check_options`` too."""

    def resolved(self, group: Group) -> Group:
        """Return a group in which options that are None have the value they stand for."""
        return group

    def admitted(self, param_group: Group) -> Group:
        """Return a new group with all options, as plain data.

        Raises:
            ValueError, TypeError: for options and for parameters that cannot be used, naming them.
        """
        checks.check_option_names(param_group, self.defaults, type(self).__name__)
        group = checks.completed(param_group, self.defaults)
        self.check_options(group)
        checks.check_new_group(group, self)
        return group

    def readings_of(self, group: Group) -> list[Stiefel | None]:
        """Return how a group reads each of its parameters; None for plain ones.

        Raises:
            ValueError: for a learned scale, unless :attr:`learns_scale`, naming the parameter.
        """
        checks.check_learned_scale(group, self)
        return [checks.reading(parameter, group) for parameter in group["params"]]

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        """Return what messages call parameters: their names, or their places in groups."""
        return checks.names_of(parameters, self.param_groups)

    def check_finite(self, parameters: Sequence[Tensor]) -> None:
        """Raise a ValueError for a parameter that is not finite, naming it; waits for a device."""
        checks.check_finite(parameters, self.param_groups)

    def check_memory(self) -> None:
        """Raise a ValueError for a constrained parameter whose memory another one has too."""
        checks.check_memory(self.param_groups)

    def warn_if_nothing_is_constrained(self) -> None:
        """Warn where matrices are optimized and none is tagged, unless that is intended."""
        checks.warn_if_nothing_is_constrained(self.param_groups)

    def skipped_steps(self) -> dict[str, int]:
        """Return how many steps each parameter has missed because its gradient was not finite.

        Parameters that missed none are left out. Counted since this optimizer was made, under
        ``nonfinite="skip"``. Waits for an accelerator.
        """
        counts = self.skipped_steps_of()
        return dict(zip(self.names_of(list(counts)), counts.values(), strict=True))

    def skipped_steps_of(self) -> dict[Tensor, int]:
        """Return the counts of :meth:`skipped_steps` by parameter."""
        raise NotImplementedError

    @override
    def __repr__(self) -> str:
        return checks.described(self)
