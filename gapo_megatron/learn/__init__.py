"""From a batch to new weights: plan, pack, score, loss, update."""
