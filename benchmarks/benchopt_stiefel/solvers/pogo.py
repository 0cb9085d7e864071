from benchmark_utils import FIRST, MOMENTUM, descend
from benchmark_utils.solver import OneRun


class Solver(OneRun):
    """POGO: a step along the manifold, then one towards it; torch's SGD for the rest."""

    name = "POGO"
    parameters = {"nesterov": [False], "rate": FIRST}
    requirements = ["pip::pogo-torch"]

    def run(self, _):
        import pogo.base
        import torch

        def make(constrained, plain):
            rule = pogo.base.SGD(momentum=MOMENTUM, nesterov=self.nesterov)
            found = [pogo.POGO(constrained, rule, self.rate)]
            if plain:
                options = {"lr": self.rate, "momentum": MOMENTUM, "nesterov": self.nesterov}
                found.append(torch.optim.SGD(plain, **options))
            return found

        self.result = descend(self.problem, make, wide=True)
