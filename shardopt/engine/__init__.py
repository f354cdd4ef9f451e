"""The train step, readable in call order: config, axes, layout, loss, gradients, update, step."""
