"""What all solvers of this benchmark do alike."""

from benchopt import BaseSolver


class OneRun(BaseSolver):
    """Solves a problem once; `run` leaves its result in ``self.result``."""

    sampling_strategy = "run_once"

    def set_objective(self, problem):
        self.problem = problem

    def get_result(self):
        return self.result
