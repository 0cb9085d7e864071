from benchmark_utils import Problem, orthonormal
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """Projection-robust Wasserstein distance of a cube in 30 dimensions and of its fragments."""

    name = "PRW"
    parameters = {"seed": [0]}
    requirements = ["pip::torch"]

    def get_data(self):
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        cube, pieces = 2 * torch.rand(2, 100, 30, generator=generator, dtype=torch.float64) - 1
        pieces[:, :2] += 2 * pieces[:, :2].sign()
        scaling = torch.ones(100, dtype=torch.float64)  # of the rows of the plan, kept

        def loss(constrained, plain, step):
            (x,) = constrained
            cost = torch.cdist(cube @ x, pieces @ x).square()
            with torch.no_grad():
                kernel, u = torch.exp(-cost), scaling.clone() if step else torch.ones_like(scaling)
                for _ in range(500 if step is None else 20):
                    v = 0.01 / (u @ kernel)
                    u = 0.01 / (kernel @ v)
                scaling.copy_(u)
                plan = u[:, None] * kernel * v
                entropy = (plan * (u[:, None] * v * 1e4).log()).sum() - (plan * cost).sum()
            return -(plan * cost).sum() - entropy

        start = orthonormal(30, 2, generator)
        return {"problem": Problem(loss, [start], steps=40)}
