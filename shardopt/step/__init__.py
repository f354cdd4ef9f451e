"""The train step in call order: inputs, gradients, update, step, and the strategy that holds them."""
