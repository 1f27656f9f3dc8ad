"""The plan, or the user's own sampler, as the batches of indices of an epoch, without Paddle."""
