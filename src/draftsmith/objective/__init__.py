"""What a slot is taught, how much it weighs, and the gradient of that, without ever holding all logits."""

from draftsmith.objective.head_loss import HeadTerms, Objective
from draftsmith.objective.sums import Sums
from draftsmith.objective.weights import decay_weights, default_gamma, dpace_weights

__all__ = ["HeadTerms", "Objective", "Sums", "decay_weights", "default_gamma", "dpace_weights"]
