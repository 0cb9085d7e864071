"""Principal components and the Procrustes problem on plain tensors: no module, no training data.

python examples/pca_procrustes.py       # seconds; needs nothing but torch
"""

import torch

import stiefel_opt as so

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# Principal components: the subspace of five directions that keeps the most variance.
data = torch.randn(500, 40) * torch.linspace(3.0, 0.1, 40)
covariance = data.T @ data / len(data)
exact = torch.linalg.eigvalsh(covariance)[-5:].sum()

start = so.random_point(40, 5)
components = so.ManifoldParameter(start)
optimizer = so.StiefelSGD([components], lr=0.1, momentum=0.9)
print("Principal components: 5 of 40 directions")
for step in range(301):
    optimizer.zero_grad()
    kept = (components * (covariance @ components)).sum()  # tr(X'CX)
    (-kept).backward()
    if step % 60 == 0:
        print(f"  step {step:3}  variance kept {kept:.6f}  short of the best by {exact - kept:.1e}")
    optimizer.step()
error = so.orthonormality_error(components.detach(), so.Stiefel())
print(f"  orthonormality error {error:.1e}; the best, by eigh: {exact:.6f}\n")

# Procrustes: the rotation that carries one set of points onto another.
points = torch.randn(200, 6)
turned = points @ torch.linalg.qr(torch.randn(6, 6)).Q + 0.01 * torch.randn(200, 6)
u, _, v = torch.linalg.svd(points.T @ turned)
best = (points @ (u @ v) - turned).square().mean()
print("Procrustes: an orthogonal 6 x 6 matrix from 200 pairs of points")
for determinant in (1.0, -1.0):
    start = torch.eye(6)
    start[0, 0] = determinant
    rotation = so.ManifoldParameter(start)
    optimizer = so.StiefelSGD([rotation], lr=0.3, momentum=0.9)
    for _ in range(300):
        optimizer.zero_grad()
        loss = (points @ rotation - turned).square().mean()
        loss.backward()
        optimizer.step()
    print(
        f"  start of determinant {determinant:+.0f}: loss {loss:.6f}; the best, by svd: {best:.6f}"
    )
print("""
What to see: the answers of eigh and svd, to rounding. A step never changes the sign of a square
matrix's determinant, so a square problem needs one start of either sign; keep the better end.""")
