from benchmark_utils import FIRST, MOMENTUM, descend
from benchmark_utils.solver import OneRun


class Solver(OneRun):
    """The landing field of Ablin & Peyre (2022), from its formula, under torch's SGD."""

    name = "landing"
    parameters = {"attraction": [1.0], "rate": FIRST}
    requirements = ["pip::torch"]

    def run(self, _):
        import torch

        class Landing(torch.optim.SGD):
            def step(optimizer, closure=None):  # noqa: N805
                for x in optimizer.param_groups[0]["params"][: len(self.problem.constrained)]:
                    point, grad = x.detach(), x.grad
                    along = (grad @ (point.mT @ point) - point @ (grad.mT @ point)) / 2
                    back = point @ (point.mT @ point) - point
                    x.grad = along + self.attraction * back
                super().step(closure)

        self.result = descend(
            self.problem,
            lambda constrained, plain: [
                Landing([*constrained, *plain], lr=self.rate, momentum=MOMENTUM)
            ],
        )
