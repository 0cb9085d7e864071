from benchmark_utils import FIRST, MOMENTUM, descend
from benchmark_utils.solver import OneRun


class Restarting:
    """Drops the momentum where the last step went uphill.

    Reference: O'Donoghue & Candes (2015), Adaptive restart for accelerated gradient schemes, 3.2.
    """

    def __init__(self, optimizer, weights):
        self.optimizer, self.weights = optimizer, weights
        self.before = [weight.detach().clone() for weight in weights]
        self.zero_grad = optimizer.zero_grad

    def step(self):
        moved = zip(self.weights, self.before, strict=True)
        if sum(float((w.grad * (w.detach() - old)).sum()) for w, old in moved) > 0:
            for weight in self.weights:
                parts = self.optimizer.velocity(weight)
                self.optimizer.set_velocity(weight, *(0 * part for part in parts))
        self.before = [weight.detach().clone() for weight in self.weights]
        self.optimizer.step()


class Solver(OneRun):
    """This package, with the options that a comparison of its defaults needs."""

    name = "stiefel-opt"
    parameters = {
        "method": ["StiefelSGD", "StiefelAdam", "ProjectedRGD", "CayleySGD", "CayleyAdam"],
        "metric": ["canonical"], "transport": ["isometric"], "nesterov": [False],
        "restart": [False], "rate": FIRST,
    }  # fmt: skip
    requirements = ["pip::stiefel-opt"]

    def run(self, _):
        import stiefel_opt as so

        options = {"lr": self.rate}
        if self.method.startswith("Stiefel"):
            options |= {"metric": self.metric, "transport": self.transport}
        if self.method == "StiefelAdam":
            options |= {"radius": 1.0, "nesterov": False}  # the step as printed
        if self.method == "ProjectedRGD":
            options |= {"metric": self.metric, "retraction": "qr"}
        if not self.method.endswith("Adam"):
            options |= {"momentum": MOMENTUM, "nesterov": self.nesterov}

        def make(constrained, plain):
            optimizer = getattr(so, self.method)([*constrained, *plain], **options)
            return [Restarting(optimizer, constrained) if self.restart else optimizer]

        self.result = descend(self.problem, make, so.ManifoldParameter)
