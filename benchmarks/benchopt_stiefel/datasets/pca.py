from benchmark_utils import Problem, orthonormal
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """Eight leading eigenvectors of the covariance of 64 pixels of digits, or each by itself."""

    name = "PCA"
    parameters = {"weighted": [False, True], "seed": [0]}
    requirements = ["pip::torch", "pip::scikit-learn"]

    def get_data(self):
        import torch
        from sklearn.datasets import load_digits

        pixels = torch.from_numpy(load_digits().data)
        pixels = pixels - pixels.mean(0)
        covariance = pixels.T @ pixels / len(pixels)
        weights = torch.arange(8.0, 0, -1).double() / 8 if self.weighted else torch.ones(8).double()
        largest = torch.linalg.eigvalsh(covariance).flip(0)[:8]

        def loss(constrained, plain, step):
            (x,) = constrained
            return -((covariance @ x) * x * weights).sum()

        start = orthonormal(64, 8, torch.Generator().manual_seed(self.seed))
        minimum = -float((weights * largest).sum())
        return {"problem": Problem(loss, [start], steps=200, minimum=minimum)}
