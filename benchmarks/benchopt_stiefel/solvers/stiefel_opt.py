from benchmark_utils import FIRST, MOMENTUM, descend
from benchmark_utils.solver import OneRun


class Solver(OneRun):
    """This package, with the options that a comparison of its defaults needs."""

    name = "stiefel-opt"
    parameters = {
        "method": ["StiefelSGD", "StiefelAdam", "ProjectedRGD", "CayleySGD", "CayleyAdam"],
        "metric": ["canonical"],
        "transport": ["isometric"],
        "nesterov": [False],
        "rate": FIRST,
    }
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
            return [getattr(so, self.method)([*constrained, *plain], **options)]

        self.result = descend(self.problem, make, so.ManifoldParameter)
