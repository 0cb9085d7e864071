"""Minimise a function of orthonormal matrices, and of unconstrained parameters beside them."""

from benchopt import BaseObjective


class Objective(BaseObjective):
    """What a run ends with: the full loss, and at which step it was near the optimum for good."""

    name = "Orthonormal matrices"
    requirements = ["pip::torch", "pip::scikit-learn", "pip::stiefel-opt"]
    min_benchopt_version = "1.7"
    sampling_strategy = "run_once"

    def set_data(self, problem):
        self.problem = problem

    def get_objective(self):
        return {"problem": self.problem}

    def get_one_result(self):
        return {"constrained": self.problem.constrained, "plain": self.problem.plain, "losses": []}

    def evaluate_result(self, constrained, plain, losses):
        return self.problem.evaluate(constrained, plain, losses)
