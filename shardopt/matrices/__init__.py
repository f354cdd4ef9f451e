"""Updates of optimizers that need whole matrices: each matrix goes to one owner, which updates it."""
