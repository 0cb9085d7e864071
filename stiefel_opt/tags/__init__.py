"""Tags: how a tensor is read as matrices, which parameters are constrained, what may go wrong."""
