from benchmark_utils import FIRST, MOMENTUM, descend
from benchmark_utils.solver import OneRun


class Solver(OneRun):
    """Retractions, with the momentum projected; one second moment a matrix in its Adam."""

    name = "geoopt"
    parameters = {"method": ["SGD", "Adam"], "metric": ["euclidean"]}
    parameters |= {"nesterov": [False], "rate": FIRST}
    requirements = ["pip::geoopt"]

    def skip(self, problem):  # noqa: ARG002
        return self.method == "Adam" and self.nesterov, "geoopt's Adam has no Nesterov variant"

    def run(self, _):
        import geoopt

        manifold = geoopt.Stiefel(canonical=self.metric == "canonical")

        def make(constrained, plain):
            parameters = [*constrained, *plain]
            if self.method == "Adam":
                return [geoopt.optim.RiemannianAdam(parameters, lr=self.rate)]
            options = {"lr": self.rate, "momentum": MOMENTUM, "nesterov": self.nesterov}
            return [geoopt.optim.RiemannianSGD(parameters, **options)]

        self.result = descend(
            self.problem, make, lambda point: geoopt.ManifoldParameter(point, manifold=manifold)
        )
