from benchmark_utils import Problem, orthonormal
from benchopt import BaseDataset


class Dataset(BaseDataset):
    """Independent components of 32 whitened principal components of digits: log cosh, maximised."""

    name = "ICA"
    parameters = {"seed": [0]}
    requirements = ["pip::torch", "pip::scikit-learn"]

    def get_data(self):
        import torch
        from sklearn.datasets import load_digits

        pixels = torch.from_numpy(load_digits().data)
        left = torch.linalg.svd(pixels - pixels.mean(0), full_matrices=False).U
        white = left[:, :32] * len(pixels) ** 0.5

        def loss(constrained, plain, step):
            (x,) = constrained
            sources = white @ x
            return (torch.nn.functional.softplus(-2 * sources) + sources).mean(0).sum()

        start = orthonormal(32, 32, torch.Generator().manual_seed(self.seed))
        return {"problem": Problem(loss, [start], steps=60)}
