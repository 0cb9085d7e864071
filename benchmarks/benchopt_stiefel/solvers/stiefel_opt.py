from benchmark_utils import FIRST, MOMENTUM, descend
from benchopt import BaseSolver


class Solver(BaseSolver):
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
    sampling_strategy = "run_once"

    def set_objective(self, problem):
        self.problem = problem

    def run(self, _):
        import stiefel_opt as so

        options = {"lr": self.rate}
        if self.method.startswith("Stiefel"):
            options |= {"metric": self.metric, "transport": self.transport}
        if self.method == "ProjectedRGD":
            options |= {"metric": self.metric, "retraction": "qr"}
        if not self.method.endswith("Adam"):
            options |= {"momentum": MOMENTUM, "nesterov": self.nesterov}
        make = getattr(so, self.method)
        self.result = descend(
            self.problem,
            lambda constrained, plain: [make([*constrained, *plain], **options)],
            so.ManifoldParameter,
        )

    def get_result(self):
        return self.result
