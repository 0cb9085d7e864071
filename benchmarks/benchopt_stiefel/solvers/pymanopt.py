from benchmark_utils.solver import OneRun


class Solver(OneRun):
    """Conjugate gradients with a line search, for losses of one matrix without batches."""

    name = "pymanopt CG"
    requirements = ["pip::pymanopt"]

    def skip(self, problem):
        if problem.plain or len(problem.constrained) > 1:
            return True, "one matrix without batches"
        return False, None

    def run(self, _):
        import pymanopt
        import torch

        problem = self.problem
        manifold = pymanopt.manifolds.Stiefel(*problem.constrained[0].shape)

        @pymanopt.function.pytorch(manifold)
        def cost(point):
            return problem.loss([point], [], None)

        optimizer = pymanopt.optimizers.ConjugateGradient(
            max_iterations=problem.steps, min_gradient_norm=1e-12, verbosity=0, log_verbosity=1
        )
        found = optimizer.run(
            pymanopt.Problem(manifold, cost), initial_point=problem.constrained[0].numpy()
        )
        self.result = {
            "constrained": [torch.from_numpy(found.point)],
            "plain": [],
            "losses": list(found.log["iterations"]["cost"]),
        }
